"""Skeleton: what goes while the answer grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.decoding.holding import Holding
from mmkv_bench.compression.scorers.window import WindowScorer


class SkeletonScorer(WindowScorer):
    """SnapKV's scores as they are; a method needs a scorer, whose class stands in this file."""


@dataclass(frozen=True)
class SkeletonPolicy(Holding):
    """While an answer is decoded every head stays as large as it was: a new token costs the oldest entry but `first`."""

    hold: Literal["ratio", "size"] = (
        "size"  # "ratio": heads grow with the answer, by the share of the prompt that they kept
    )
    first: int = 4  # a parameter of yours: methods.<this file>.args.first=8

    def slot(self, entries: int, start: int) -> int:
        # Which entry goes, 0 the oldest, entries - 1 the newest; `start` is how many the head held before the answer.
        return min(self.first, entries - 2)

    # Holding evicts by place. A policy that looks at attention, or stores entries otherwise, is a DecodePolicy with a layer
    # of its own: mmkv_bench/compression/decoding/heavy_hitters.py.

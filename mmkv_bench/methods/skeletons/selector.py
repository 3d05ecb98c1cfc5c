"""Skeleton: what stays whatever its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.topk import TopK

if TYPE_CHECKING:
    from torch import Tensor


class SkeletonScorer(WindowScorer):
    """SnapKV's scores as they are; a method needs a scorer, whose class stands in this file."""


@dataclass(frozen=True)
class SkeletonSelector(TopK):
    """The highest scores, beside sinks, the last tokens, and the first token after each image or video."""

    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        keep = super().protected(length, budget, types)  # bool [tokens]; `sinks` and `recents` are TopK's parameters
        if types is not None:
            keep[1:] |= (types[1:] == 0) & (types[:-1] != 0)  # 0 text, 1 image, 2 video
        return keep  # where more is protected than a head may hold, the last of it stays

    # `select` turns scores and caps into indices: override it where "protected, then the highest" is not what you want.

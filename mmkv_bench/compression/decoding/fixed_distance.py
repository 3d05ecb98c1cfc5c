"""Fixed-distance eviction: while decoding, the entry at a fixed distance from the newest one is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.decoding.holding import Holding
from mmkv_bench.compression.parameter_checks import check_least


@dataclass(frozen=True)
class FixedDistance(Holding):
    """PrefixKV (arXiv 2412.03409, section 3.1) and ElasticCache (arXiv 2407.18121): eviction at a fixed distance.

    Args:
        hold, positions, slack: see ``Holding``.
        distance: d, distance of the evicted entry to the newest one, or to the prompt's end (``anchor``) [entries]; 0
            evicts the newest entry itself.
        anchor: "newest": the d-th entry before the newest one is evicted, PrefixKV's text. "prefill": the entry with
            the fixed index ``m - d`` is evicted, where m is the head's number of entries when the answer began, slack
            included: ElasticCache's "fixed truncation location" near the end of the instruction; both releases do
            this. Both choose the same entry with hold=size. In a cache too short for d, however, "newest" takes index
            1 (after the first token) and "prefill" index ``m // 2``, as PrefixKV's release.

    Paper and code: PrefixKV's release uses anchor=prefill and positions=cached. It computes a head's allowed size from
    the evicted fraction in its file, this class from the share that was kept. Not reproduced: in a cache shorter than
    d, ElasticCache's release computes a negative index and then duplicates entries.
    """

    distance: int = 25
    anchor: Literal["newest", "prefill"] = "newest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "entries", "distance")

    def slot(self, entries: int, start: int) -> int:
        newest = entries - 1
        if self.anchor == "prefill":
            place = start - self.distance
            return min(place if place >= 1 else start // 2, newest)
        return max(newest - self.distance, min(1, newest - 1), 0)

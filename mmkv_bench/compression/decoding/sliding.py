"""A sliding window: while decoding, the oldest entry after the attention sinks is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.decoding.holding import Holding
from mmkv_bench.compression.parameter_checks import check_least


@dataclass(frozen=True)
class Sliding(Holding):
    """StreamingLLM (arXiv 2309.17453) with a window that moves on while decoding: "Local" in PrefixKV's tables.

    Args:
        hold: "size" by default: a window of constant size, which slides; "ratio": it grows with the answer.
        positions, slack: see ``Holding``.
        sinks: first entries that stay, at most all but the newest; equal to the selector's sinks.

    Paper and code: ElasticCache's release, which PrefixKV's tables use, has hold=ratio and positions=cached.
    StreamingLLM itself caches keys without rotation and rotates them by their index in the cache; here keys keep their
    positions in the text.
    """

    hold: Literal["ratio", "size"] = "size"
    sinks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "entries", "sinks")

    def slot(self, entries: int, start: int) -> int:
        return min(self.sinks, max(start - 1, 0), entries - 1)

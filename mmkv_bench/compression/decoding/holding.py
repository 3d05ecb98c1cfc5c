"""Base of decode policies that limit a layer's size by evicting after each new token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.parameter_checks import check_least, check_words

if TYPE_CHECKING:
    from mmkv_bench.compression.cache import CompressedCache
    from mmkv_bench.compression.decoding.evicting_layer import EvictingLayer


@dataclass(frozen=True)
class Holding(DecodePolicy):
    """Base of fixed-distance eviction and of a sliding window; subclasses choose the entry to evict.

    Let a head hold m entries when the answer begins, including prompt tokens fed after the reduction (the question, or
    the token that ``strict`` feeds again), and rho be the share of the prompt (or context) that the head kept, slack
    included. After k answer tokens the head may hold ``m + rho * k`` entries under "ratio" and m under "size". As soon
    as it holds at least one more, one entry is evicted, after the newest token has attended to it. Counts are exact and
    kept on the host: no step waits for the device.

    Args:
        hold: "ratio": a head keeps the same share of the answer as of the prompt; "size": its size stays constant.
        positions: "own": a new token is rotated at its own position in prompt and answer. "cached": at the number of
            entries that layer 0 holds, as in the releases of PrefixKV and ElasticCache: kept keys keep their rotation,
            so queries sit among or before them.
        slack: number of entries that a head may hold in addition.
    """

    hold: Literal["ratio", "size"] = "ratio"
    positions: Literal["own", "cached"] = "own"
    slack: int = 0

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "entries per head", "slack")

    @property
    def moves_queries(self) -> bool:
        return self.positions == "cached"

    @abstractmethod
    def slot(self, entries: int, start: int) -> int:
        """Return the index of the entry that a head evicts: 0 is its oldest entry, ``entries - 1`` its newest.

        Args:
            entries: number of the head's entries, the newest included.
            start: m plus slack.
        """

    def layer(self, start: Start) -> EvictingLayer:
        from mmkv_bench.compression.decoding.evicting_layer import EvictingLayer

        room = start.reserve if self.hold == "ratio" else start.room_until_evicting(self.slack + 1)
        return EvictingLayer.of(start, room, self.slack, self.hold == "ratio", self.slot)

    def query_positions(self, cache: CompressedCache, position_ids: Tensor) -> Tensor:
        first = cache.compressed[0]
        if self.positions == "own" or first.seen < first.acts_from:
            return position_ids
        count = max(first.entry_counts())
        cached = torch.arange(
            count, count + position_ids.shape[-1], device=position_ids.device, dtype=position_ids.dtype
        )
        cached_position_ids = cached.expand_as(position_ids).clone()
        if position_ids.ndim == 3 and position_ids.shape[0] == 4:
            cached_position_ids[0] = position_ids[0]  # not a rotary axis: it tells packed sequences apart
        return cached_position_ids

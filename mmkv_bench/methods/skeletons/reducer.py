"""Skeleton: what is left of evicted entries in those that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.window import WindowScorer

if TYPE_CHECKING:
    from torch import Tensor


class SkeletonScorer(WindowScorer):
    """SnapKV's scores as they are; a method needs a scorer, whose class stands in this file."""


@dataclass(frozen=True)
class SkeletonReducer(Evict):
    """Kept entries as they are, and a share of the prompt's average value in each."""

    share: float = 0.1  # a parameter of yours: methods.<this file>.args.share=0.2

    @property
    def merges(self) -> bool:
        return True  # evicted entries leave a trace

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept_key, kept_value = super().reduce(key, value, index, types)  # [KV heads, kept, D]; new tensors
        mean = value.float().mean(dim=1, keepdim=True)  # key and value are only read: other methods share them
        mixed = (1 - self.share) * kept_value.float() + self.share * mean
        padded = (index < 0).unsqueeze(-1)  # heads that keep fewer are padded on the left, with zeros
        return kept_key, mixed.masked_fill(padded, 0).to(value.dtype)

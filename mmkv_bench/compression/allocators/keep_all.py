"""The allocator of the full cache: nothing is evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor


@dataclass(frozen=True)
class KeepAll(Allocator):
    """An allocator that keeps every candidate, whatever the budget."""

    @property
    def follows_prompt(self) -> bool:
        return False

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        return same_in_heads(scores, [score.shape[1] for score in scores])

"""Allocator of the full cache: nothing is evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.allocators.base import Allocator

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.context import Context


@dataclass(frozen=True)
class KeepAll(Allocator):
    """Every candidate stays, whatever the budget: the full cache as a compressor, for ``full`` and for proofs."""

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
        import torch

        return [torch.full((s.shape[0],), s.shape[1], dtype=torch.int64) for s in scores]

"""Uniform budgets that keep only entries with positive scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor


@dataclass(frozen=True)
class PositiveOnly(Allocator):
    """An allocator that grants a KV head with p positive scores ``min(budget, p)`` entries. No parameters.

    Controls drop a kind of token altogether this way, even if part of the budget stays unused. The selector must
    protect nothing.
    """

    falls_short = True
    streams = True

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        return [(s > 0).sum(-1).clamp_max(budget).cpu() for s in scores]

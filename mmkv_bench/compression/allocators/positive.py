"""Uniform budgets that leave out entries without a positive score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor


@dataclass(frozen=True)
class PositiveOnly(Allocator):
    """Every KV head keeps ``min(budget, p)`` entries, p being its candidates with a positive score. No parameters.

    The one allocator that may leave a budget unused: controls use it to drop a kind of token altogether. It needs a
    selector that protects nothing.
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

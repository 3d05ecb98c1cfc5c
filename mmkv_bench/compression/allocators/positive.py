"""Uniform budgets without the entries that have no positive score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor


@dataclass(frozen=True)
class PositiveOnly(Allocator):
    """An allocator by which every KV head keeps ``min(budget, p)`` entries, p of its candidates having a positive score.
    No parameters.

    No other allocator may leave a budget unused in this way: controls use it to drop a kind of token altogether. It
    needs a selector that protects nothing.
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

"""Skeleton: which layers and KV heads get how much of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.scorers.window import WindowScorer

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.context import Context


class SkeletonScorer(WindowScorer):
    """SnapKV's scores as they are; a method needs a scorer, whose class stands in this file."""


@dataclass(frozen=True)
class SkeletonAllocator(Allocator):
    """Half of a layer's budget goes to every KV head alike, the rest to whichever heads hold the highest scores."""

    least: float = 0.5  # a parameter of yours: methods.<this file>.args.least=0.3

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        # One layer at a time. `scope = "model"` in the class gives all of them at once, and memory falls only then.
        return [self._heads(score, min(budget, score.shape[1])) for score in scores]

    def _heads(self, score: Tensor, budget: int) -> Tensor:
        """Entries of each head of one layer, int64 [KV heads] on the CPU, that add up to budget * KV heads."""
        import torch

        heads = score.shape[0]
        floor = int(self.least * budget)
        ranked = score.sort(dim=-1, descending=True, stable=True)
        ranked.values[:, :floor] = torch.inf
        best = ranked.values.flatten().sort(descending=True, stable=True).indices[: budget * heads]
        return torch.bincount(best.cpu() // score.shape[1], minlength=heads)

"""AdaKV as in kvpress: one budget for a layer's KV heads, and a floor for the best entries of every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.parameter_checks import check_share


@dataclass(frozen=True)
class Safeguard(Allocator):
    """An allocator that gives every head of a layer a floor, and the rest of the layer's budget to the highest scores.

    With C entries per KV head, each head's ``floor`` highest scores stay first. The highest of all other scores in the
    layer get the rest (equal scores: lower head, then lower token, first). A layer holds exactly ``C * Hkv`` entries.

    Args:
        alpha: share of C that is every head's floor, in [0, 1]; rounded down, and at least one entry unless alpha is 0.

    Source: kvpress's AdaKVPress (arXiv 2407.11550 as NVIDIA reads it). In AdaKV's own algorithm (``HeadPool``) the
    entries that fill a head's floor count again when the rest is divided; here they do not.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_share(self, "alpha", "the budget")

    def floor(self, budget: int) -> int:
        """Return the smallest number of entries that a head keeps, in kvpress's floating-point arithmetic."""
        return max(min(budget, 1), int(budget * self.alpha)) if self.alpha > 0 else 0

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        return [self.layer(score, budget).cpu() for score in scores]

    def layer(self, score: Tensor, budget: int) -> Tensor:
        """Return the caps of one layer with scores ``[Hkv, n]``: int64 ``[Hkv]`` on the scores' device."""
        heads, candidates = score.shape
        if budget >= candidates:
            return torch.full((heads,), candidates, dtype=torch.int64, device=score.device)
        floor = self.floor(budget)
        others = score.sort(dim=-1, descending=True, stable=True).values[:, floor:]
        best_indices = others.flatten().sort(descending=True, stable=True).indices[: heads * (budget - floor)]
        return (best_indices // others.shape[1]).bincount(minlength=heads) + floor

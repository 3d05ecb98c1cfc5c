"""KVzip: one threshold for the scores of all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Threshold(Allocator):
    """An allocator that grants the budget to the highest scores of the whole model, in any layer and head.

    With C entries per KV head, the ``C * Hkv * L`` highest scores of the L layers stay, so a head may keep everything
    or nothing. Equal scores stay in the order of layer, head and token. Scores of different layers must have one scale.

    Args:
        layerwise: the ``C * Hkv`` highest scores of each layer stay; layers do not compete.

    Source: KVzip (arXiv 2505.23416), which takes AdaKV's pool (arXiv 2407.11550) without its floor.
    """

    layerwise: bool = False

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "layer" if self.layerwise else "model"

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        if self.layerwise:
            return [self._pool_caps([score], budget)[0] for score in scores]
        return self._pool_caps(scores, budget)

    @staticmethod
    def _pool_caps(scores: Sequence[Tensor], budget: int) -> list[Tensor]:
        heads, candidates = scores[0].shape
        pool = torch.cat([score.to(scores[0].device).flatten() for score in scores])
        best_indices = pool.sort(descending=True, stable=True).indices[: budget * heads * len(scores)]
        caps = (best_indices // candidates).bincount(minlength=heads * len(scores))
        return list(caps.cpu().view(len(scores), heads))

"""What every allocator promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


class Allocator(ABC):
    """Divides a budget among layers and KV heads.

    Class attributes:
        scope: "layer" decides each layer at once, so peak memory falls during prefill; "model" needs the scores of all
            layers and decides after the last one.
        excess: entries per KV head granted ABOVE the budget. It is 0 in every paper reading; a released code that
            stores more than it states declares its excess here, so that a plan and an audit can name it.
    """

    scope: Literal["layer", "model"] = "layer"
    excess: int = 0

    @abstractmethod
    def caps(self, scores: Sequence[Tensor], budget: int, layers: Sequence[int], n_layers: int) -> list[Tensor]:
        """Entries per KV head for each given layer.

        Args:
            scores: per layer, float32 ``[Hkv, n]`` for n candidates (one layer for scope "layer", all for "model").
            budget: entries per KV head on average, sinks, window and last token included; may be 0.
            layers: indices of the layers that ``scores`` belong to.
            n_layers: layers of the model.

        Returns:
            Per layer int64 ``[Hkv]`` on the CPU, each at most n, with a sum of at most
            ``(budget + excess) * Hkv * len(scores)`` and exactly that when n exceeds ``budget + excess``. An allocator
            that divides the budget among layers keeps to its ``allowance`` instead.
        """

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        """Entries that one KV head of each of the given layers may hold, added up, before any score is known.

        Args:
            budget, layers, n_layers: see ``caps``; candidates: n.

        Returns:
            ``budget * len(layers)``; an allocator of scope "layer" whose layers differ returns its own share, which must
            be at most ``budget * n_layers`` over all layers.
        """
        return budget * len(layers)

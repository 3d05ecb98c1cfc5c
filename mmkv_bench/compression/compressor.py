"""Compressor = Scorer x Allocator x Selector x Reducer: which entries of a prefilled prompt stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv_bench.errors import MMKVError

if TYPE_CHECKING:
    from mmkv_bench.compression.allocators.base import Allocator
    from mmkv_bench.compression.reducers.base import Reducer
    from mmkv_bench.compression.scorers.base import Scorer
    from mmkv_bench.compression.selectors.base import Selector


class NonFiniteScoreError(MMKVError):
    """A scorer produced NaN or infinity: the cell's row gets status `nan`."""


class OverBudgetError(MMKVError):
    """An allocation or selection above the budget outside `reading=released`."""


@dataclass(frozen=True)
class Compressor:
    """One method, composed. `scorer=None` is `full`: nothing is scored and nothing is evicted.

    Attributes:
        name: the name that tables show.
        reading: `paper`, or `released` for what the released code does; only the latter may exceed a budget.
    """

    name: str
    scorer: Scorer | None = None
    allocator: Allocator | None = None
    selector: Selector | None = None
    reducer: Reducer | None = None
    reading: str = "paper"

    @property
    def is_full(self) -> bool:
        return self.scorer is None

    @property
    def scope(self) -> str:
        """`layer` when a layer can be reduced as soon as it is prefilled, `model` when all layers must be seen."""
        return "layer" if self.allocator is None else self.allocator.scope

    def fallbacks(self, budget: int, length: int) -> tuple[str, ...]:
        """What could not be done as asked for this prompt, as enumerated names for the row."""
        if not self.is_full and length <= budget:
            return ("prompt_within_budget",)
        return () if self.is_full else tuple(self.scorer.fallbacks(budget, length))

    def select(
        self,
        scores: Sequence[Tensor],
        budget: int,
        token_types: Tensor | None,
        layers: Sequence[int],
        n_layers: int,
        strict: bool = False,
        orders: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Choose what stays of a prompt longer than its budget.

        Args:
            scores: per layer float32 `[Hkv, T]`.
            budget: C, entries per KV head averaged over the model, `C < T`.
            token_types: int `[T]` (0 text, 1 image, 2 video) or None.
            layers: the layers that `scores` belong to; n_layers: all layers of the model.
            strict: the last prompt token will be fed again. Its column is dropped from the candidates and one entry
                per head is reserved for it, so C - 1 entries per head are chosen from T - 1.
            orders: per layer `selector.order(candidates)` when the caller already has it.

        Returns:
            Per layer int64 `[Hkv, m]` kept token indices, ascending, padded on the left with -1.

        Raises:
            NonFiniteScoreError, OverBudgetError.
        """
        length = scores[0].shape[-1]
        candidates = length - 1 if strict else length
        granted = budget - 1 if strict else budget
        for layer, score in zip(layers, scores, strict=True):
            if not bool(torch.isfinite(score).all()):
                raise NonFiniteScoreError(f"{self.name} gave non-finite scores in layer {layer}")
        protected = self.selector.protected(length, budget, token_types)[:candidates].to(scores[0].device)
        scores = [score[:, :candidates] for score in scores]
        caps = self.allocator.caps(scores, granted, layers, n_layers)
        index = [self.selector.select(score, cap, protected) for score, cap in zip(scores, caps, strict=True)]
        if self.reading != "released":
            kept = sum(int((i >= 0).sum()) for i in index)
            allowed = scores[0].shape[0] * self._allowance(granted, candidates, layers, n_layers)
            if kept > allowed:
                raise OverBudgetError(f"{self.name} kept {kept} entries where the budget allows {allowed}")
        return index

    def _allowance(self, granted: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        """Entries per KV head that these layers may hold together; no division among layers may exceed the model's."""
        whole = self.allocator.allowance(granted, candidates, range(n_layers), n_layers)
        if whole > granted * n_layers:
            raise OverBudgetError(
                f"{self.name} divides {whole} entries per KV head among {n_layers} layers where the budget allows "
                f"{granted * n_layers}"
            )
        return self.allocator.allowance(granted, candidates, layers, n_layers)


def full() -> Compressor:
    """The full cache: the baseline that nothing compresses."""
    return Compressor("full")

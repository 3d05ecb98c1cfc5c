"""Interface of selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mmkv_bench.compression.context import Composed
from mmkv_bench.compression.lazy_torch import Tensor


class Selector(ABC):
    """A rule without state that chooses the entries that stay, from scores, caps and a mask of protected tokens.

    Class attributes:
        needs_visual: prompts without visual tokens are refused.
        exceeds: more than the caps may be kept with these parameters.
        printed: ``exceeds`` follows from the paper's own formula. Then it is allowed under ``reading=paper`` too, and
            marked in rows and tables.
        falls_short: less than the caps may be kept with these parameters.
        streams: the selector needs no token types and fills every cap, as ``protocol=stream`` demands.

    A subclass sets these attributes, or defines properties if they depend on its parameters.
    """

    needs_visual: bool = False
    streams: bool = False

    @property
    def exceeds(self) -> bool:
        return False

    @property
    def printed(self) -> bool:
        return False

    @property
    def falls_short(self) -> bool:
        return False

    def method_version(self, method: Composed) -> int:
        """Return the version of this part's results; see ``Scorer.method_version``."""
        return 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return names of what cannot be done as configured; see ``Scorer.fallbacks``."""
        return ()

    @abstractmethod
    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        """Return which tokens of the WHOLE prompt, its last one included, are kept whatever their scores: bool ``[T]``.

        The result is on the CPU, or on the device of ``types``.

        Args:
            length: T, tokens of the prompt.
            budget: C, entries per KV head.
            types: int ``[T]``, 0 text, 1 image, 2 video; None when unknown.
        """

    @abstractmethod
    def select(
        self, scores: Tensor, caps: Tensor, protected: Tensor, order: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the indices of the entries to keep.

        Protected candidates come first; if they exceed a cap, the LAST of them are kept. Then come the highest scores;
        of equal scores, the lower index. Every row is treated separately: heads of several layers may be stacked.

        Args:
            scores: float32 or float64 ``[Hkv, n]``.
            caps: int64 ``[Hkv]``, entries granted to each head (0 allowed).
            protected: bool ``[n]``, or ``[Hkv, n]`` when heads differ.
            order: the result of ``self.order(scores)``, which several budgets can share; None: computed here.
            types: int ``[n]`` of the candidates, 0 text, 1 image, 2 video; None when unknown.

        Returns:
            int64 ``[Hkv, max(min(caps, n))]`` on the scores' device, ascending in each row, LEFT-padded with -1.
        """

    @staticmethod
    def order(scores: Tensor) -> Tensor:
        """Return indices by falling score, equal scores by rising index: int64 ``[Hkv, n]``."""
        return scores.sort(dim=-1, descending=True, stable=True).indices

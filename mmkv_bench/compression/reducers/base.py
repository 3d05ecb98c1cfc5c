"""Interface of reducers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mmkv_bench.compression.context import Composed
from mmkv_bench.compression.lazy_torch import Tensor


class Reducer(ABC):
    """A rule that makes the entries to store from a full cache and the selected indices.

    Class attributes:
        merges: entries that are not selected are merged into selected ones. A property if this depends on parameters.
    """

    @property
    def merges(self) -> bool:
        return False

    def method_version(self, method: Composed) -> int:
        """Return the version of this part's results; see ``Scorer.method_version``."""
        return 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return names of what cannot be done as configured; see ``Scorer.fallbacks``."""
        return ()

    @abstractmethod
    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[Hkv, m, D]`` of the slots in ``index``. Nothing is written to the inputs.

        Args:
            key: ``[Hkv, n, D]`` of the candidates (no padding, no token that will be fed again), rotated at their own
                positions.
            value: ``[Hkv, n, D]``.
            index: int64 ``[Hkv, m]``, ascending, LEFT-padded with -1; padded slots come back as zeros.
            types: int ``[n]`` of the candidates, 0 text, 1 image, 2 video; None when unknown.
        """

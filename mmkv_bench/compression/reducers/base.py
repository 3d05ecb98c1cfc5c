"""What every reducer promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Reducer(ABC):
    """Builds the entries that stay from a full cache. It never writes to its inputs: other forks still read them."""

    @abstractmethod
    def reduce(self, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[Hkv, m, D]`` of the slots in ``index``.

        Args:
            key: ``[Hkv, T, D]``, rotated at the tokens' own positions.
            value: ``[Hkv, T, D]``.
            index: int64 ``[Hkv, m]``, ascending, LEFT-padded with -1; padded slots come back as zeros.
        """

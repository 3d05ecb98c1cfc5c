"""Bytes of a device's memory, and what counts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Bytes(NamedTuple):
    """`allocated` bytes of live storages; `reserved` ones that an allocator holds for them, None where it does not say."""

    allocated: int
    reserved: int | None = None

    def larger(self, other: Bytes) -> Bytes:
        """The larger of both, number by number."""
        sides = [one.reserved for one in (self, other) if one.reserved is not None]
        return Bytes(max(self.allocated, other.allocated), max(sides) if sides else None)


class Counters(ABC):
    """Memory that is held now, and the most that was held since `restart`."""

    @abstractmethod
    def held(self) -> Bytes: ...

    @abstractmethod
    def peak(self) -> Bytes: ...

    @abstractmethod
    def alike(self, one: Tensor, other: Tensor) -> None:
        """Count another tensor where one is counted: of a pass that stands for a larger one."""

    @abstractmethod
    def restart(self) -> None:
        """Begin the peak again with what is held now."""

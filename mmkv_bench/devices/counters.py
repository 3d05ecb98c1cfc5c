"""Byte counts of a device's memory, and the interface of counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Bytes(NamedTuple):
    """`allocated` bytes of live storages, and `reserved` bytes that an allocator has claimed for them; None if it does not
    report any."""

    allocated: int
    reserved: int | None = None

    def larger(self, other: Bytes) -> Bytes:
        """Return the larger of both counts, number by number."""
        sides = [one.reserved for one in (self, other) if one.reserved is not None]
        return Bytes(max(self.allocated, other.allocated), max(sides) if sides else None)


class Counters(ABC):
    """Counters of the memory in use now, and of its peak since `restart`."""

    @abstractmethod
    def held(self) -> Bytes: ...

    @abstractmethod
    def peak(self) -> Bytes: ...

    @abstractmethod
    def alike(self, one: Tensor, other: Tensor) -> None:
        """Count `other` as well if `one` is counted: `other` belongs to a pass that stands for a larger one."""

    @abstractmethod
    def restart(self) -> None:
        """Reset the peak to the memory in use now."""

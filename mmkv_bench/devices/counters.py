"""Byte counts of a device's memory, and the interface of counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Bytes(NamedTuple):
    """Bytes of a device: `allocated` to live storages, and `reserved` by the device's allocator for them.

    `reserved` is None if the allocator does not report it.
    """

    allocated: int
    reserved: int | None = None

    def larger(self, other: Bytes) -> Bytes:
        """Return the larger of both counts, `allocated` and `reserved` separately."""
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
        """Count the tensor `other` as well if `one` is counted.

        A pass that runs with fewer tensors than the real one uses this to count as many bytes as the real one.
        """

    @abstractmethod
    def restart(self) -> None:
        """Reset the peak to the memory in use now."""

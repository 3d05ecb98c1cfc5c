"""Byte counts of a device's memory, and the interface of counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Bytes(NamedTuple):
    """Memory in use on a device: bytes of live storages, and bytes that the device's allocator reserved for them.

    `reserved` is None if the allocator does not report it.
    """

    allocated: int
    reserved: int | None = None

    def larger(self, other: Bytes) -> Bytes:
        """Return the elementwise maximum of two byte counts."""
        known_reserved = [one.reserved for one in (self, other) if one.reserved is not None]
        return Bytes(max(self.allocated, other.allocated), max(known_reserved) if known_reserved else None)


class Counters(ABC):
    """A counter of the memory in use on a device, now and at its peak since `restart`."""

    @abstractmethod
    def held(self) -> Bytes: ...

    @abstractmethod
    def peak(self) -> Bytes: ...

    @abstractmethod
    def alike(self, one: Tensor, other: Tensor) -> None:
        """Count the tensor `other` too if the tensor `one` is counted, so that a pass with fewer tensors counts as many bytes."""

    @abstractmethod
    def restart(self) -> None:
        """Reset the peak to the memory in use now."""

"""Storages of fixed caches that outlive a prompt: the next one of the same shape is decoded at the same addresses.

A CUDA graph is recorded with addresses, and recorded again where they are others. So what a compiled step reads and writes is
kept here, a set for each shape of a cache, and kept entries are copied into it; two caches that live at once have two sets.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmkv_bench import devices

SHARE = 0.1  # of the device's memory that sets may keep which no cache uses


@dataclass(frozen=True)
class StorageShape:
    """Shape and placement of one layer's storage; layers of equal shapes share storages."""

    rows: int
    heads: int
    slots: int
    widths: tuple[int, int]  # of a key and of a value
    dtype: torch.dtype
    device: torch.device
    padded: bool
    by_lengths: bool  # a kernel reads it that is told where heads begin


class LayerBuffers:
    """One layer's tensors, see `FixedLayer`: keys and values `[B, Hkv, slots, D]`, the two counts, where padding ends and where
    heads begin."""

    def __init__(self, shape: StorageShape):
        self.keys, self.values = (
            torch.zeros(shape.rows, shape.heads, shape.slots, width, dtype=shape.dtype, device=shape.device)
            for width in shape.widths
        )
        self.length = torch.tensor(0, device=shape.device)
        self.shown = torch.tensor(0, device=shape.device)
        self.first: Tensor | None = None
        self.starts: Tensor | None = None
        if shape.by_lengths:
            self.starts = torch.zeros(shape.rows * shape.heads + 1, dtype=torch.int32, device=shape.device)
        if shape.padded:
            self.first = torch.zeros(shape.rows, shape.heads, 1, 1, dtype=torch.int64, device=shape.device)

    def tensors(self) -> list[Tensor]:
        further = [tensor for tensor in (self.first, self.starts) if tensor is not None]
        return [self.keys, self.values, self.length, self.shown, *further]


@dataclass
class _Set:
    shapes: tuple[StorageShape, ...]
    rooms: list[LayerBuffers]
    user: weakref.ref[object] | None = field(default=None)

    @property
    def free(self) -> bool:
        return self.user is None or self.user() is None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for room in self.rooms for tensor in room.tensors())


class Pool:
    """Sets of storages of one model."""

    def __init__(self) -> None:
        self._sets: list[_Set] = []  # the one that was used last stands last

    def rooms(self, shapes: Sequence[StorageShape], user: object) -> list[LayerBuffers]:
        """Lend a free set of storages, or make one, to `user` for as long as that lives."""
        wanted = tuple(shapes)
        made = self._free(wanted)
        if made is None and any(one.shapes == wanted for one in self._sets):
            gc.collect()  # a cache that was traced is held by the cycles of what traced it
            made = self._free(wanted)
        if made is None:
            made = _Set(wanted, self._made(wanted))
        else:
            self._sets.remove(made)
        self._sets.append(made)
        made.user = weakref.ref(user)
        self._leave(int(SHARE * devices.at(wanted[0].device).total_bytes()))
        return made.rooms

    def _free(self, shapes: tuple[StorageShape, ...]) -> _Set | None:
        """Return the most recently used free set of these shapes."""
        return next((one for one in reversed(self._sets) if one.shapes == shapes and one.free), None)

    def _made(self, shapes: Sequence[StorageShape]) -> list[LayerBuffers]:
        try:
            return [LayerBuffers(shape) for shape in shapes]
        except torch.OutOfMemoryError:
            self.clear()
            return [LayerBuffers(shape) for shape in shapes]

    def _leave(self, limit: int) -> None:
        """Drop free sets, the least recently used first, until the rest fits the limit of bytes."""
        for one in [one for one in self._sets if one.free]:
            if sum(other.nbytes for other in self._sets if other.free) <= limit:
                return
            self._sets.remove(one)

    def tensors(self) -> list[Tensor]:
        """Tensors of all sets, used or not."""
        return [tensor for one in self._sets for room in one.rooms for tensor in room.tensors()]

    def clear(self) -> None:
        """Drop all free sets, and the graphs that were recorded on them."""
        places = {one.shapes[0].device for one in self._sets}
        self._sets = [one for one in self._sets if not one.free]
        for place in places:
            devices.at(place).forget_graphs()


_POOLS: weakref.WeakKeyDictionary[nn.Module, Pool] = weakref.WeakKeyDictionary()


def pool_of(model: nn.Module) -> Pool:
    """Return the model's pool, which lives as long as the model."""
    return _POOLS.setdefault(model, Pool())


def bucket(slots: int) -> int:
    """Round slots up, by an eighth at most (or to 64), so that prompts of similar lengths share a shape."""
    step = max(64, 1 << max(slots.bit_length() - 4, 0))
    return -(-slots // step) * step

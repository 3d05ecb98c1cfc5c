"""Compressed layer of fixed capacity, which `torch.compile` can trace, so that a decode step becomes one graph.

While a prompt is prefilled and reduced the layer works like any `CompressedLayer`. Then `fix` freezes its storage: new
tokens are written in place, the number of filled slots is a tensor, attention reads the storage in its full width, and
the mask comes from lengths. No shape and no Python number changes from step to step, so nothing is traced twice.

A CUDA graph is recorded for certain addresses. So a `Pool` keeps the storage after a prompt, and the next prompt of the
same shape is decoded at the same addresses. Two caches that live at once have separate storage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmkv_bench import devices
from mmkv_bench.compression.cache import _NOTHING, CompressedCache, CompressedLayer
from mmkv_bench.compression.varlen_layer import Sequences, VarlenLayer, folds
from mmkv_bench.errors import UnsupportedError


class FixedLayer(CompressedLayer):
    """The entries of one layer for `B` sequences, in storage that does not grow any more once `fix` was called."""

    is_compileable = True

    _length: Tensor  # int64 [], filled slots; before `fix`, `_stored` counts them
    _tokens_seen: Tensor  # int64 [], tokens seen
    _first: Tensor | None  # int64 [B, Hkv, 1, 1], the first slot that is not padding; None: no padding
    _starts: Tensor | None  # int32 [B Hkv + 1], where each head's entries begin; None: a mask is used

    @classmethod
    def of(cls, layer: CompressedLayer) -> FixedLayer:
        """Return a layer, not fixed yet, that shares the storage of `layer` but counts its own tokens."""
        assert not isinstance(layer, VarlenLayer) or not layer.folded, (
            "who decodes from fixed storage prefills without packing"
        )
        fixed_layer = cls(layer.reserve)
        fixed_layer.dtype, fixed_layer.device, fixed_layer.is_initialized = layer.dtype, layer.device, True
        fixed_layer._key_storage, fixed_layer._value_storage = layer._key_storage, layer._value_storage
        fixed_layer._position_storage = layer._position_storage
        fixed_layer.stored, fixed_layer.seen, fixed_layer.ragged = layer.stored, layer.seen, layer.ragged
        return fixed_layer

    def _clear(self) -> None:
        self.fixed = False
        super()._clear()

    @property
    def stored(self) -> int:
        return int(self._length) if self.fixed else self._stored

    @stored.setter
    def stored(self, value: int) -> None:
        if self.fixed:
            self._length.fill_(value)
        else:
            self._stored = value

    @property
    def seen(self) -> int:
        return int(self._tokens_seen) if self.fixed else self._seen

    @seen.setter
    def seen(self, value: int) -> None:
        if self.fixed:
            self._tokens_seen.fill_(value)
        else:
            self._seen = value

    # ------------------------------------------------------------------ from here on nothing moves
    def padding(self, pads: Sequence[int]) -> Tensor | None:
        """Count the padding slots at the left of each head, int64 `[B, Hkv]`; None if there are none.

        pads: number of padding tokens of each prompt of the batch, which are stored if nothing was evicted.
        """
        batch, heads = self._key_storage.shape[:2]
        if (positions := self.positions) is not None:
            return (positions < 0).sum(-1) if self.ragged else None
        if not any(pads):
            return None
        return torch.tensor(pads, device=self.device)[:, None].expand(batch, heads)

    def shape(self, padded: bool, rounded: bool) -> StorageShape:
        """Return the shape of the storage that `fix` needs.

        padded: whether a layer of the cache has padding. rounded: round the number of slots up (`bucket`).
        """
        rows, heads = self._key_storage.shape[:2]
        widths = self._key_storage.shape[-1], self._value_storage.shape[-1]
        slots = bucket(self.capacity) if rounded else self.capacity
        by_lengths = widths[0] == widths[1] and folds(self.device, self.dtype, widths[0])
        return StorageShape(rows, heads, slots, widths, self.dtype, self.device, padded, by_lengths)

    def fix(self, padding: Tensor | None, buffers: LayerBuffers) -> None:
        """Move the entries into the tensors of `buffers`, which do not grow.

        padding: number of padding slots of each head (`padding()`); None if no layer of the cache has any.
        """
        stored, seen, slots = self.stored, self.seen, buffers.keys.shape[2]
        if (places := self._position_storage) is not None:  # tokens come in order: positions of free slots are known
            self._position_storage = places.new_empty(*places.shape[:2], slots)
            self._position_storage[:, :, :stored] = places[:, :, :stored]
            self._position_storage[:, :, stored:] = torch.arange(
                seen, seen + slots - stored, dtype=torch.int32, device=self.device
            )
        for storage, old in ((buffers.keys, self._key_storage), (buffers.values, self._value_storage)):
            storage[:, :, :stored] = old[:, :, :stored]
            storage[:, :, stored:] = 0  # these slots are masked, but 0 times stale memory may be NaN
        self._key_storage, self._value_storage = buffers.keys, buffers.values
        self._length, self._tokens_seen = buffers.length.fill_(stored), buffers.tokens_seen.fill_(seen)
        self._first, self._starts = buffers.first, buffers.starts
        if self._first is not None:
            assert padding is not None, "buffers with padding belong to a layer that has some"
            self._first.copy_(padding[:, :, None, None])
        if self._starts is not None:
            heads = self._starts.shape[0] - 1
            self._starts.copy_(torch.arange(0, (heads + 1) * slots, slots, device=self.device))
            if padding is not None:
                self._starts[:heads] += padding.flatten()
        self._mark()
        self.fixed = True

    def _mark(self) -> None:
        """Tell the compiler which tensors have stable addresses, and which dimensions may change."""
        for tensor in (self._key_storage, self._value_storage):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        optional_tensors = [tensor for tensor in (self._first, self._starts) if tensor is not None]
        for tensor in (self._key_storage, self._value_storage, self._length, self._tokens_seen, *optional_tensors):
            torch._dynamo.mark_static_address(tensor, guard=False)

    # ------------------------------------------------------------------ what the model and the mask builders see
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, Hkv, n, D]` of the next n tokens; return all stored ones, or the whole storage once fixed.

        Raises:
            UnsupportedError: fixed storage has no room for the tokens. A compiled step cannot check this; there
                `get_mask_sizes`, which runs before the step, or `index_copy_` raises an error.
        """
        if not self.fixed:
            return super().update(key_states, value_states, *args, **kwargs)
        new_tokens = key_states.shape[2]
        if not torch.compiler.is_compiling():
            self._check_room(new_tokens)
        slots = self._length + torch.arange(new_tokens, device=self._length.device)
        self._key_storage.index_copy_(2, slots, key_states)
        self._value_storage.index_copy_(2, slots, value_states)
        self._length.add_(new_tokens)
        self._tokens_seen.add_(new_tokens)
        return self._key_storage, self._value_storage

    def _check_room(self, new: int) -> None:
        if self.stored + new > self.capacity:
            raise UnsupportedError(
                f"the answer needs more than the {self.capacity} entries per head reserved for compiled decoding "
                f"({self.stored} are in use); reserve more new tokens, or decode eagerly"
            )

    def get_seq_length(self) -> int:
        return self._tokens_seen if self.fixed else self._seen  # type: ignore[return-value]  # a tensor, as StaticLayer's

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (capacity, 0) once the layer is fixed. The layer then masks by lengths and ignores transformers' mask.

        Raises:
            UnsupportedError: as `update`.
        """
        if not self.fixed:
            return super().get_mask_sizes(query_length)
        if not torch.compiler.is_compiling():
            self._check_room(query_length)
        return self.capacity, 0

    def get_max_length(self) -> int:
        return self.capacity if self.fixed else -1

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the attention kernel reads, see `CompressedLayer.attend`. A fixed layer uses its own mask."""
        if not self.fixed:
            return super().attend(query, key, value, mask)
        return key, value, self.visible_slots(query.shape[2])

    @property
    def back_to_back(self) -> bool:  # type: ignore[override]
        """True if attention reads the entries by a kernel that takes lengths, not a mask, and so reads no free slots."""
        return self.fixed and self._starts is not None

    def sequences(self) -> Sequences:
        """Return the storage, new tokens included, in the form that `varlen_layer.attend` reads."""
        rows, heads, slots, _ = self._key_storage.shape
        used_slots = self._length.int().expand(rows * heads)
        if self._first is not None:
            used_slots = used_slots - self._first.flatten().int()
        keys, values = (storage.flatten(0, 2) for storage in (self._key_storage, self._value_storage))
        assert self._starts is not None, "the caller checks `back_to_back`"
        return Sequences(keys, values, self._starts, used_slots.contiguous(), slots, (rows, heads))

    def visible_slots(self, new: int) -> Tensor:
        """Return the mask of the slots that the `new` newest tokens see: bool `[B|1, Hkv|1, new, capacity]`, True = visible."""
        slots = torch.arange(self.capacity, device=self.device)
        newest = self._length - new + torch.arange(new, device=self.device)
        visible = (slots <= newest[:, None])[None, None]
        return visible if self._first is None else visible & (slots >= self._first)

    def buffers(self) -> list[Tensor]:
        optional_tensors = [self._length, self._tokens_seen, self._first, self._starts] if self.fixed else []
        return super().buffers() + [tensor for tensor in optional_tensors if tensor is not None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.fixed:
            raise UnsupportedError(
                "a cache of fixed capacity cannot reorder or repeat its rows; for beams or several answers, "
                "decode eagerly"
            )
        super()._map(change)


def fix(cache: CompressedCache, pool: Pool, pads: Sequence[int] = (), rounded: bool = True) -> CompressedCache:
    """Move a cache to storage of fixed size, so that `torch.compile` traces its decode step once; return the cache.

    Args:
        pool: lends the storage.
        pads: left padding of each row.
        rounded: round slots up (`bucket`), so that prompts of similar length share storage.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, FixedLayer)]
    assert len(layers) == len(cache.layers), "a cache is fixed in every layer or in none"
    padding = [layer.padding(pads) for layer in layers]
    ragged = any(pads_of_layer is not None for pads_of_layer in padding)
    lent_buffers = pool.lend([layer.shape(ragged, rounded) for layer in layers], cache)
    for layer, pads_of_layer, buffers in zip(layers, padding, lent_buffers, strict=True):
        if ragged and pads_of_layer is None:
            pads_of_layer = torch.zeros(layer._key_storage.shape[:2], dtype=torch.int64, device=layer.device)
        layer.fix(pads_of_layer, buffers)
    return cache


def fixed_view(cache: CompressedCache, pool: Pool, rounded: bool = True) -> CompressedCache:
    """Move a cache to storage of fixed size, lent by `pool`, and return it as a new cache.

    The old storage is released layer by layer. `cache` becomes a view of the new cache, and must not be used while the new
    cache is fed. rounded: see `fix`.

    Raises:
        UnsupportedError: the cache has layers that are not compressed.
    """
    if cache.states:
        raise UnsupportedError(
            "a compiled decode step reads one kind of layer, but this cache also has windows or recurrent "
            "states; use decode=eager"
        )
    layers = []
    for layer in cache.layers:
        layers.append(FixedLayer.of(layer))
        layer._key_storage = layer._value_storage = _NOTHING
    fixed = fix(CompressedCache.of(layers), pool, rounded=rounded)
    for layer, made in zip(cache.layers, layers, strict=True):
        layer._key_storage, layer._value_storage = made._key_storage, made._value_storage
        layer._position_storage = made._position_storage
    return fixed


SHARE = 0.1  # of the device's memory that unused sets may keep


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
    by_lengths: bool  # read by a kernel that takes each head's start


class LayerBuffers:
    """The tensors that a fixed layer uses (see `FixedLayer`), with keys and values `[B, Hkv, slots, D]`."""

    def __init__(self, shape: StorageShape):
        self.keys, self.values = (
            torch.zeros(shape.rows, shape.heads, shape.slots, width, dtype=shape.dtype, device=shape.device)
            for width in shape.widths
        )
        self.length = torch.tensor(0, device=shape.device)
        self.tokens_seen = torch.tensor(0, device=shape.device)
        self.first: Tensor | None = None
        self.starts: Tensor | None = None
        if shape.by_lengths:
            self.starts = torch.zeros(shape.rows * shape.heads + 1, dtype=torch.int32, device=shape.device)
        if shape.padded:
            self.first = torch.zeros(shape.rows, shape.heads, 1, 1, dtype=torch.int64, device=shape.device)

    def tensors(self) -> list[Tensor]:
        optional_tensors = [tensor for tensor in (self.first, self.starts) if tensor is not None]
        return [self.keys, self.values, self.length, self.tokens_seen, *optional_tensors]


@dataclass
class _Set:
    shapes: tuple[StorageShape, ...]
    buffers: list[LayerBuffers]
    user: weakref.ref[object] | None = field(default=None)

    @property
    def free(self) -> bool:
        return self.user is None or self.user() is None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for buffers in self.buffers for tensor in buffers.tensors())


class Pool:
    """The storages of one model. A set of buffers, one per layer, is lent to a cache and later reused."""

    def __init__(self) -> None:
        self._sets: list[_Set] = []  # the most recently used is last

    def lend(self, shapes: Sequence[StorageShape], user: object) -> list[LayerBuffers]:
        """Lend a set of storages of these shapes until `user` is garbage-collected. A new set is made if none is free."""
        requested_shapes = tuple(shapes)
        buffer_set = self._find_free_set(requested_shapes)
        if buffer_set is None and any(one.shapes == requested_shapes for one in self._sets):
            gc.collect()  # reference cycles of the tracer keep a traced cache alive
            buffer_set = self._find_free_set(requested_shapes)
        if buffer_set is None:
            buffer_set = _Set(requested_shapes, self._new_buffers(requested_shapes))
        else:
            self._sets.remove(buffer_set)
        self._sets.append(buffer_set)
        buffer_set.user = weakref.ref(user)
        self._drop_free_sets(int(SHARE * devices.at(requested_shapes[0].device).total_bytes()))
        return buffer_set.buffers

    def _find_free_set(self, shapes: tuple[StorageShape, ...]) -> _Set | None:
        return next((one for one in reversed(self._sets) if one.shapes == shapes and one.free), None)

    def _new_buffers(self, shapes: Sequence[StorageShape]) -> list[LayerBuffers]:
        try:
            return [LayerBuffers(shape) for shape in shapes]
        except torch.OutOfMemoryError:
            self.clear()
            return [LayerBuffers(shape) for shape in shapes]

    def _drop_free_sets(self, limit: int) -> None:
        """Drop free sets, the least recently used first, until the remaining free sets have at most `limit` bytes."""
        for one in [one for one in self._sets if one.free]:
            if sum(other.nbytes for other in self._sets if other.free) <= limit:
                return
            self._sets.remove(one)

    def tensors(self) -> list[Tensor]:
        return [tensor for one in self._sets for buffers in one.buffers for tensor in buffers.tensors()]

    def clear(self) -> None:
        """Drop all free sets, and the graphs that were recorded on them."""
        devices_used = {one.shapes[0].device for one in self._sets}
        self._sets = [one for one in self._sets if not one.free]
        for place in devices_used:
            devices.at(place).forget_graphs()


_POOLS: weakref.WeakKeyDictionary[nn.Module, Pool] = weakref.WeakKeyDictionary()


def pool_of(model: nn.Module) -> Pool:
    """Return the model's pool, which lives as long as the model."""
    return _POOLS.setdefault(model, Pool())


def bucket(slots: int) -> int:
    """Return `slots` rounded up by at most an eighth (or to 64), so that prompts of similar lengths share a shape."""
    step = max(64, 1 << max(slots.bit_length() - 4, 0))
    return -(-slots // step) * step

"""The KV cache whose logical length (tokens seen) differs from its stored length (entries kept).

Masks and positions always use logical coordinates. Each layer has `positions`, the logical index of every stored slot
(-1 marks a padding slot), and the attention function maps the logical mask through it. Kept indices ascend and ragged
heads are padded on the left, so that a new token goes to the same last column of every head.

Storage is preallocated with slack, and appending writes in place. A layer whose slack runs out grows by at least a
quarter of its size, so appends stay amortised O(1); `growths` counts these events. Callers that know the longest answer
reserve its slots, so their layers never grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mmkv_bench.compression import states
from mmkv_bench.errors import UnsupportedError

Reduce = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Kernel = Callable[..., tuple[Tensor, Tensor | None]]  # of attention: returns its output, and weights or None
DEFAULT_RESERVE = 32  # slots of slack when the number of new tokens is unknown
_NOTHING = torch.empty(1, 0, 0, 0)  # the storage of a layer that has been shown nothing


class CompressedLayer(CacheLayerMixin):
    """The entries of one layer for `B` sequences.

    Attributes:
        keys, values: views `[B, Hkv, stored, D]` of the storage, in the model's dtype.
        positions: int32 `[B, Hkv, stored]` logical index of each slot, -1 for padding; None while slot i holds token i.
        ragged: True when some slot is padding.
        seen: tokens that the layer has been shown, evicted ones included.
        fixed: the storage does not grow any more (`fixed_layer.py`).
        back_to_back: attention reads the layer by a kernel that takes sequence lengths in place of a mask
            (`varlen_layer.attend`).
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False
    fixed = False
    back_to_back = False

    dtype: torch.dtype
    device: torch.device

    def __init__(self, reserve: int = DEFAULT_RESERVE, **_: Any) -> None:
        super().__init__()
        self.reserve = reserve
        self._clear()

    def _clear(self) -> None:
        self._key_storage = self._value_storage = _NOTHING
        self._position_storage: Tensor | None = None
        self.stored = 0
        self.seen = 0
        self.ragged = False
        self.growths = 0
        self.is_initialized = False

    # ------------------------------------------------------------------ storage
    @property
    def keys(self) -> Tensor:
        return self._read_keys()

    @keys.setter
    def keys(self, value: None) -> None:  # the base class assigns None in its constructor
        if value is not None:
            raise AttributeError("a CompressedLayer's storage changes through update() and retain() only")

    @property
    def values(self) -> Tensor:
        return self._read_values()

    @values.setter
    def values(self, value: None) -> None:
        if value is not None:
            raise AttributeError("a CompressedLayer's storage changes through update() and retain() only")

    def _read_keys(self) -> Tensor:
        return self._key_storage[:, :, : self.stored]

    def _read_values(self) -> Tensor:
        return self._value_storage[:, :, : self.stored]

    @property
    def positions(self) -> Tensor | None:
        return None if self._position_storage is None else self._position_storage[:, :, : self.stored]

    @property
    def capacity(self) -> int:
        """Number of allocated slots per head, slack included."""
        return self._key_storage.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, dim = key_states.shape
        self._key_storage = key_states.new_empty(batch, heads, 0, dim)
        self._value_storage = value_states.new_empty(batch, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def _make_room(self, new: int) -> None:
        if self.stored + new <= self.capacity:
            return
        self.growths += self.stored > 0
        slot_count = self.stored + new + max(self.reserve, self.stored // 4)

        def grow(old: Tensor) -> Tensor:
            storage = old.new_empty(*old.shape[:2], slot_count, *old.shape[3:])
            storage[:, :, : self.stored] = old[:, :, : self.stored]
            return storage

        self._key_storage, self._value_storage = grow(self._key_storage), grow(self._value_storage)
        if self._position_storage is not None:
            self._position_storage = grow(self._position_storage)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, Hkv, n, D]` of the next n tokens; return all stored keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_tokens = key_states.shape[2]
        self._make_room(new_tokens)
        end = self.stored + new_tokens
        self._key_storage[:, :, self.stored : end] = key_states
        self._value_storage[:, :, self.stored : end] = value_states
        if self._position_storage is not None:
            new_positions = torch.arange(self.seen, self.seen + new_tokens, dtype=torch.int32, device=key_states.device)
            self._position_storage[:, :, self.stored : end] = new_positions
        self.stored = end
        self.seen += new_tokens
        return self.keys, self.values

    # ------------------------------------------------------------------ what generate() and the mask builders see
    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # ------------------------------------------------------------------ compression
    def slot_positions(self) -> Tensor:
        """Return the logical index (token number) of every slot, int64 `[B, Hkv, stored]`, even if `positions` is None."""
        if (positions := self.positions) is not None:
            return positions.long()
        batch, heads = self._key_storage.shape[:2]
        return torch.arange(self.stored, device=self.device).expand(batch, heads, -1)

    def retain(
        self, index: Tensor, reduce: Reduce | Sequence[Reduce], reserve: int | None = None, forget: int = 0
    ) -> None:
        """Keep the slots `index` only, with keys and values as `reduce` returns them.

        Args:
            index: int64 `[B, Hkv, m]` slots to keep, ascending, padded on the left with -1.
            reduce: function `(key [Hkv, S, D], value, index [Hkv, m]) -> (key [Hkv, m, D], value)`, called per sequence; or
                one such function per sequence.
            reserve: slots of slack after the kept ones; None: the layer's default.
            forget: number of newest tokens that no longer count as seen (they must not be kept).
        """
        batch, heads, kept_count = index.shape
        slot_count = kept_count + (self.reserve if reserve is None else reserve)
        old_positions = self.slot_positions()
        fresh_keys = self._key_storage.new_zeros(batch, heads, slot_count, self._key_storage.shape[-1])
        fresh_values = self._value_storage.new_zeros(batch, heads, slot_count, self._value_storage.shape[-1])
        for row, one in enumerate(reduce if isinstance(reduce, Sequence) else [reduce] * batch):
            fresh_keys[row, :, :kept_count], fresh_values[row, :, :kept_count] = one(
                self.keys[row], self.values[row], index[row]
            )
        positions = index.new_empty(batch, heads, slot_count, dtype=torch.int32)
        kept_positions = old_positions.gather(2, index.clamp_min(0))
        positions[:, :, :kept_count] = kept_positions.masked_fill(index < 0, -1)
        self._key_storage, self._value_storage, self._position_storage = fresh_keys, fresh_values, positions
        self.stored = kept_count
        self.seen -= forget
        self.ragged = bool((positions[:, :, :kept_count] < 0).any())

    def forget(self, count: int) -> None:
        """Drop the slots of the `count` newest tokens in every head, because these tokens will be fed again."""
        self.stored -= count
        self.seen -= count

    def visible(self, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask over stored slots that corresponds to a mask over all tokens seen (the logical mask).

        Args:
            query: `[B, Hq, n, D]`; its shape gives the number of queries.
            mask: `[B|1, 1, n, seen]` bool (True = visible) or additive float, or None when nothing is masked.

        Returns:
            Mask of the same kind `[B, Hkv, n, stored]`, one for all query heads of a KV head. `mask` itself while slot i
            holds token i; None when every stored slot is visible to every query.

        Raises:
            UnsupportedError: no mask is given for several queries, although some slots are padding.
        """
        positions = self.positions
        if positions is None:
            return mask
        batch, heads, _ = positions.shape
        is_entry = positions >= 0 if self.ragged else None
        if mask is None:
            if is_entry is None:
                return None
            if query.shape[2] != 1:
                raise UnsupportedError(
                    "the base attention gave no mask for several query tokens on a compressed cache; use "
                    "attention=sdpa or attention=eager"
                )
            mask = is_entry[:, :, None]
        else:
            index = positions.clamp_min(0).long()[:, :, None].expand(-1, -1, mask.shape[-2], -1)
            mask = mask.expand(batch, heads, -1, -1).gather(-1, index)
            if is_entry is not None and mask.dtype == torch.bool:
                mask = mask & is_entry[:, :, None]
            elif is_entry is not None:
                mask = mask.masked_fill(~is_entry[:, :, None], torch.finfo(mask.dtype).min)
        return mask

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Overwrite the keys and values of the stored entries, `[B, Hkv, stored, D]`."""
        self._key_storage[:, :, : self.stored], self._value_storage[:, :, : self.stored] = keys, values

    def attention(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run an attention kernel on what `attend` returns; return its output `[B, n, Hq, D]` and its weights (or None)."""
        return kernel(query, *self.attend(query, key, value, mask))

    # ------------------------------------------------------------------ what decode policies override
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the attention kernel reads in place of (key, value, logical mask).

        Args:
            query: `[B, Hq, n, D]`, rotated.
            key, value: what `update` returned.
            mask: the logical mask, see `visible`.

        Returns:
            Keys and values `[B, Hkv, slots, D]`, and their mask `[B, Hq|Hkv|1, n, slots]` or None.
        """
        return key, value, self.visible(query, mask)

    def attended(self, query: Tensor, scaling: float) -> None:
        """React to the attention of a forward, right after it. No effect here; subclasses accumulate scores or evict."""

    def drop(self, slots: Tensor) -> None:
        """Remove one slot of every head, int64 `[B, Hkv]`, in place; all later entries move one slot to the left."""
        batch, heads = slots.shape
        slot = torch.arange(self.stored - 1, device=self.device)
        index = slot + (slot >= slots[:, :, None].to(self.device))
        positions = self.slot_positions().gather(2, index)
        self._move(index)
        if self._position_storage is None:
            self._position_storage = positions.new_empty(batch, heads, self.capacity, dtype=torch.int32)
        self._position_storage[:, :, : self.stored - 1] = positions
        self.stored -= 1
        self.ragged = bool((positions < 0).any())

    def _move(self, index: Tensor, right: bool = False) -> None:
        """Copy slot `index[..., j]` to slot j, block by block, so that no second cache is needed. index: int64 `[B, Hkv, m]`.

        right: entries move to higher slots: no `index[..., j]` is above j, and the last block is copied first. Otherwise entries
        move to lower slots: no `index[..., j]` is below j.
        """
        width = index.shape[2]
        block = max(64, -(-width // 16))
        block_starts = range(0, width, block)
        for storage in (self._key_storage, self._value_storage):
            for start in reversed(block_starts) if right else block_starts:
                block_index = index[:, :, start : start + block, None].expand(-1, -1, -1, storage.shape[-1])
                storage[:, :, start : start + block_index.shape[2]] = storage.gather(2, block_index)

    # ------------------------------------------------------------------ audit
    def entries(self) -> Tensor:
        """Count the entries in the stored slots, int64 `[B, Hkv]`; padding is not an entry."""
        if (positions := self.positions) is None:
            batch, heads = self._key_storage.shape[:2]
            return torch.full((batch, heads), self.stored, dtype=torch.int64)
        return (positions >= 0).sum(-1).cpu()

    def nbytes(self) -> tuple[int, int]:
        """Return (bytes of stored keys and values, bytes of positions), with padding slots and without slack."""
        if not self.is_initialized:
            return 0, 0
        data = self.keys.numel() * self.keys.element_size() + self.values.numel() * self.values.element_size()
        positions = self.positions
        return data, 0 if positions is None else positions.numel() * positions.element_size()

    def buffers(self) -> list[Tensor]:
        """Return all tensors of the layer, slack included, once each."""
        storages = (self._key_storage, self._value_storage, self._position_storage)
        return [tensor for tensor in storages if tensor is not None and tensor is not _NOTHING]

    def padding_nbytes(self) -> int:
        """Return the bytes of stored slots that are padding, their positions included."""
        if (positions := self.positions) is None:
            return 0
        padding_slots = positions.numel() - int(self.entries().sum())
        return padding_slots * (self.slot_nbytes + positions.element_size())

    def read_nbytes(self, fed: int) -> int:
        """Return the bytes that attention reads to decode one token after `fed` further tokens.

        They include the new token's key and value, padding, and in subclasses scales, minima and mean keys.
        """
        batch, heads = self._key_storage.shape[:2]
        return batch * heads * (self.stored + fed + 1) * self.slot_nbytes

    def moved_nbytes(self) -> int:
        """Return the bytes of entries that a decode step copies from host memory to the device."""
        return 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot's key and value."""
        return sum(storage.shape[-1] * storage.element_size() for storage in (self._key_storage, self._value_storage))

    def reachable(self) -> Tensor:
        """Count the entries that a later step may read, in the cache or in host memory: int64 `[B, Hkv]`."""
        return self.entries()

    def host_nbytes(self) -> int:
        """Return the bytes of entries that are stored in host memory."""
        return 0

    # ------------------------------------------------------------------ batch operations of generate()
    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._key_storage, self._value_storage = change(self._key_storage), change(self._value_storage)
        if self._position_storage is not None:
            self._position_storage = change(self._position_storage)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices])

    def reset(self) -> None:
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedError("a compressed cache cannot be cropped (assisted decoding is not supported); use greedy")

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Tensor, Tensor, Tensor | None]], seen: int, reserve: int) -> Self:
        """Build a layer for several sequences.

        Args:
            rows: per sequence key `[Hkv, m, D]`, value `[Hkv, m, D]` and positions int64 `[Hkv, m]` (-1 = padding);
                positions are None for all sequences if slot i of each holds token i.
            seen: most tokens that a sequence has been shown.
            reserve: slots that will be appended; the layer never grows within them.
        """
        layer = cls(reserve)
        key, value, _ = rows[0]
        heads, _, dim = key.shape
        stored = max(key.shape[1] for key, _, _ in rows)
        layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
        layer._key_storage = key.new_zeros(len(rows), heads, stored + reserve, dim)
        layer._value_storage = value.new_zeros(len(rows), heads, stored + reserve, value.shape[-1])
        places = torch.full((len(rows), heads, stored + reserve), -1, dtype=torch.int32, device=key.device)
        for row, (key, value, positions) in enumerate(rows):
            start = stored - key.shape[1]
            layer._key_storage[row, :, start:stored] = key
            layer._value_storage[row, :, start:stored] = value
            if positions is not None:
                places[row, :, start:stored] = positions
        layer.stored, layer.seen = stored, seen
        if any(positions is not None for _, _, positions in rows):
            layer._position_storage = places
            layer.ragged = bool((places[:, :, :stored] < 0).any())
        return layer


class CompressedCache(Cache):
    """A cache that is passed to a model as `past_key_values`.

    It has a `CompressedLayer` for each compressed layer of the model. Layers that are not compressed (`states.py`) are in
    the cache too, at their own indices.

    Attributes:
        query_positions: function `(cache, position_ids) -> position_ids` that changes the positions of decoded tokens, or
            None. Decode policies set it to reproduce wrong positions in a method's released code.
    """

    query_positions: Callable[[CompressedCache, Tensor], Tensor] | None = None

    def __init__(self, num_layers: int, reserve: int = DEFAULT_RESERVE):
        super().__init__(layers=[CompressedLayer(reserve) for _ in range(num_layers)])

    @classmethod
    def of(cls, layers: Sequence[Any]) -> CompressedCache:
        cache = cls(0)
        cache.layers = list(layers)
        return cache

    def like(self, compressed: Sequence[CompressedLayer], others: Mapping[int, Any], rows: int = 1) -> CompressedCache:
        """Return a new cache with the layers `compressed`, in order, and with copies of the layers `others`.

        Args:
            others: index -> layer that is not compressed. All other indices get the layers of `compressed`.
            rows: number of copies of the single sequence in `others`.
        """
        remaining_layers = iter(compressed)
        layers = [
            states.map_tensors(others[i], lambda one: one.repeat_interleave(rows, 0))
            if i in others
            else next(remaining_layers)
            for i in range(len(self.layers))
        ]
        return CompressedCache.of(layers)

    # ------------------------------------------------------------------ layers of either kind
    @property
    def compressed(self) -> list[CompressedLayer]:
        """The compressed layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def put(self, number: int, layer: CompressedLayer) -> None:
        """Replace one compressed layer. number: its index among the compressed layers."""
        self.layers[self.layers.index(self.compressed[number])] = layer

    @property
    def states(self) -> dict[int, Any]:
        """The layers that are not compressed, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if not isinstance(layer, CompressedLayer)}

    def copy_states(self) -> dict[int, Any]:
        """Return copies of the layers that are not compressed."""
        return {i: states.map_tensors(layer, torch.clone) for i, layer in self.states.items()}

    def put_states(self, others: Mapping[int, Any]) -> None:
        """Replace the layers that are not compressed by copies of `others` (index -> layer)."""
        for i, layer in others.items():
            self.layers[i] = states.map_tensors(layer, torch.clone)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that a layer has seen.

        layer_idx: the layer's index; 0, the default, stands for the first compressed layer.
        """
        if layer_idx == 0 and (layer := next(iter(self.compressed), None)) is not None:
            return layer.get_seq_length()
        length: int = super().get_seq_length(layer_idx)
        return length

    def batch_select_indices(self, indices: Tensor) -> None:
        for i, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                layer.batch_select_indices(indices)
            else:
                self.layers[i] = states.map_tensors(layer, lambda one: one.index_select(0, indices.to(one.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        for i, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                layer.batch_repeat_interleave(repeats)
            else:
                self.layers[i] = states.map_tensors(layer, lambda one: one.repeat_interleave(repeats, 0))

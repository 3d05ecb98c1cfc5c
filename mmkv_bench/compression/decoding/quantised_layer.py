"""Cache layer whose older entries are packed, for KIVI."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.numerics.quantise import Packed, dequantise, quantise
from mmkv_bench.errors import UnsupportedError

Key = TypeVar("Key", bound=Hashable)


class _Store:
    """Keys or values of one layer: per KV head packed units, then a rest in full precision.

    A unit is quantised at once: G tokens of keys, or one token of values. Every head's entries begin at the left, in
    the order of the kept tokens, so padding is never part of a group. `units` and `unpacked` count each head's units
    and full-precision tokens.

    Args:
        entries: for each head `[m_h, D]`, in full precision.
        bits, group: see `quantise`.
        unit: tokens per unit.
        room: number of further tokens that will be appended.
    """

    def __init__(self, entries: list[Tensor], bits: int, group: int, unit: int, room: int):
        self.bits, self.group, self.unit = bits, group, unit
        self.units, self.unpacked = [0] * len(entries), [len(head) for head in entries]
        longest, dim = max(self.unpacked), entries[0].shape[-1]
        self._capacity = (longest + room) // unit
        self.packed: Packed | None = None  # made by the first flush, with room for this many units
        self.rest = entries[0].new_zeros(len(entries), longest, dim)
        for row, head in enumerate(entries):
            self.rest[row, : len(head)] = head

    def append(self, new: Tensor) -> None:
        """Append the tokens `[Hkv, n, D]` in full precision."""
        heads, n, dim = new.shape
        missing_slots = max(self.unpacked) + n - self.rest.shape[1]
        if missing_slots > 0:
            self.rest = torch.cat([self.rest, self.rest.new_zeros(heads, missing_slots, dim)], 1)
        for rows, unpacked in _group_equal(self.unpacked):
            self.rest[rows, unpacked : unpacked + n] = new[rows]
        self.unpacked = [unpacked + n for unpacked in self.unpacked]

    def flush(self, excess: list[int]) -> None:
        """Quantise, in whole units, the first `excess[h]` of the full-precision tokens of every head h."""
        if not any(excess):
            return
        written_units = list(zip(self.units, excess, strict=True))
        for rows, (units, amount) in _group_equal(written_units):
            if amount:
                self._write(rows, units, self.rest[rows, :amount])
                self.rest[rows, : self.rest.shape[1] - amount] = self.rest[rows, amount:].clone()
        self.units = [units + amount // self.unit for units, amount in written_units]
        self.unpacked = [unpacked - amount for unpacked, amount in zip(self.unpacked, excess, strict=True)]
        self.rest = self.rest[:, : max(self.unpacked)].clone()  # frees what was quantised

    def _write(self, rows: list[int], first: int, tokens: Tensor) -> None:
        """Pack tokens `[heads, units * unit, D]` of the heads `rows` as units `first`, `first + 1`, ..."""
        units = tokens.unflatten(1, (-1, self.unit)).transpose(2, 3)  # [rows, units, D, unit]
        new_packed = quantise(units if self.unit > 1 else units.flatten(2), self.bits, self.group)
        end = first + units.shape[1]
        packed = self.packed
        if packed is None or end > packed.data.shape[1]:
            packed = self.packed = self._enlarge(new_packed, end)
        for stored, part in zip(packed.parts, new_packed.parts, strict=True):
            stored[rows, first:end] = part

    def _enlarge(self, like: Packed, least: int) -> Packed:
        heads, room = len(self.units), max(least, self._capacity)
        old_packed = self.packed
        data, scale, zero = (part.new_zeros(heads, room, *part.shape[2:]) for part in like.parts)
        if old_packed is not None:
            for part, before in zip((data, scale, zero), old_packed.parts, strict=True):
                part[:, : before.shape[1]] = before
        return Packed(data, scale, zero, self.bits)

    def _filled_units(self) -> Packed | None:
        """Return all heads' packed units, zeros where a head has fewer than another; None if there are none."""
        most = max(self.units)
        if not most or self.packed is None:
            return None
        data, scale, zero = (part[:, :most] for part in self.packed.parts)
        return Packed(data, scale, zero, self.bits)

    def read(self) -> Tensor:
        """Return all entries in full precision, `[Hkv, slots, D]`, heads padded on the left with zeros."""
        used = self._filled_units()
        full_precision = self.rest[:, : max(self.unpacked)]
        if used is None:
            packed = full_precision[:, :0]
        else:
            packed = dequantise(used)
            packed = packed.transpose(2, 3).flatten(1, 2) if self.unit > 1 else packed
        counts = [units * self.unit for units in self.units]
        if len(set(counts)) == 1 and len(set(self.unpacked)) == 1:
            return torch.cat([packed, full_precision], 1)
        slots = max(count + unpacked for count, unpacked in zip(counts, self.unpacked, strict=True))
        out = full_precision.new_zeros(len(counts), slots, full_precision.shape[-1])
        for row, (count, unpacked) in enumerate(zip(counts, self.unpacked, strict=True)):
            out[row, slots - unpacked - count : slots - unpacked] = packed[row, :count]
            out[row, slots - unpacked :] = full_precision[row, :unpacked]
        return out

    def buffers(self) -> list[Tensor]:
        return [self.rest, *(() if self.packed is None else self.packed.parts)]

    @property
    def unit_nbytes(self) -> int:
        """Bytes of one head's unit: packed numbers, scales and minima."""
        numbers = self.unit * self.rest.shape[-1]
        return numbers * self.bits // 8 + 2 * numbers // self.group * self.rest.element_size()

    @property
    def token_nbytes(self) -> int:
        return self.rest.shape[-1] * self.rest.element_size()

    def padding_nbytes(self) -> int:
        """Return the bytes of units and slots that shorter heads have not filled."""
        units, unpacked = (max(counts) * len(counts) - sum(counts) for counts in (self.units, self.unpacked))
        return units * self.unit_nbytes + unpacked * self.token_nbytes

    def read_nbytes(self, units: list[int], unpacked: list[int]) -> int:
        """Return the bytes read if each head has this many packed `units` and full-precision tokens (`unpacked`)."""
        return len(units) * (max(units) * self.unit_nbytes + max(unpacked) * self.token_nbytes)

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of packed numbers and full-precision tokens, and the bytes of scales and minima.

        All heads count with the size of the longest head. Slack does not count.
        """
        data, metadata = self.rest[:, : max(self.unpacked)].nbytes, 0
        used = self._filled_units()
        if used is not None:
            data += used.data.nbytes
            metadata = used.scale.nbytes + used.zero.nbytes
        return data, metadata


class QuantisedLayer(CompressedLayer):
    """KIVI's layer for one sequence.

    Two `_Store`s hold the entries, so the base class's storage has zero channels and only slots, positions and masks
    are used. `keys` and `values` dequantise on every access.
    """

    acts_from: int
    _residual: int
    _before: bool  # quantise a full residual before the newest token attends
    _keys: _Store
    _values: _Store

    @classmethod
    def of(cls, start: Start, bits: int, group: int, value_group: int, residual: int, before: bool) -> QuantisedLayer:
        """Build the layer of a policy `KIVI` from the policy's parameters. before: whether `flush` is `before`."""
        none = start.kept_key[..., :0]
        layer = cls.from_rows([(none, none, start.positions)], start.seen, start.reserve)
        layer.acts_from, layer._residual, layer._before = start.acts_from, residual, before
        is_entry = start.index >= 0
        keys = [key[kept] for key, kept in zip(start.kept_key, is_entry, strict=True)]
        values = [value[kept] for value, kept in zip(start.kept_value, is_entry, strict=True)]
        layer._keys = _Store(keys, bits, group, group, start.reserve)
        layer._values = _Store(values, bits, value_group, 1, start.reserve)
        layer._flush()
        return layer

    def _read_keys(self) -> Tensor:
        return self._keys.read()[None]

    def _read_values(self) -> Tensor:
        return self._values.read()[None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[1, Hkv, n, D]`; return all stored ones, dequantised, `[1, Hkv, stored, D]` each."""
        self._keys.append(key_states[0])
        self._values.append(value_states[0])
        if self._before and self.seen >= self.acts_from:
            self._flush()
        return super().update(key_states[..., :0], value_states[..., :0])

    def attended(self, query: Tensor, scaling: float) -> None:
        self._flush()

    def _flush(self) -> None:
        for store in (self._keys, self._values):
            store.flush(self._tokens_to_quantise(store, store.unpacked))

    def _tokens_to_quantise(self, store: _Store, unpacked: list[int]) -> list[int]:
        """Return how many of each head's full-precision tokens (`unpacked`) to quantise now.

        Keys are quantised `residual` tokens at a time. Of the values, all but the newest `residual` tokens are
        quantised.
        """
        residual = self._residual
        return [count // residual * residual if store is self._keys else max(0, count - residual) for count in unpacked]

    # ---- audit

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), *self._keys.buffers(), *self._values.buffers()]

    def padding_nbytes(self) -> int:
        positions = self.positions
        padding_position_bytes = (
            0 if positions is None else (positions.numel() - int(self.entries().sum())) * positions.element_size()
        )
        return padding_position_bytes + self._keys.padding_nbytes() + self._values.padding_nbytes()

    def read_nbytes(self, fed: int) -> int:
        """Return the bytes of packed and full-precision entries that a decode step reads, without unpacked copies."""
        return sum(self._store_read_nbytes(store, fed) for store in (self._keys, self._values))

    def _store_read_nbytes(self, store: _Store, fed: int) -> int:
        """Return the bytes that a decode step reads of keys or of values (`store`), after `fed` more prompt tokens.

        Prompt tokens are quantised after their attention, answer tokens before or after it (`flush`).
        """
        units, unpacked = store.units, [count + fed for count in store.unpacked]
        for new in ((0,) if fed else ()) + ((1,) if self._before else ()):
            unpacked = [count + new for count in unpacked]
            excess = self._tokens_to_quantise(store, unpacked)
            units = [count + gone // store.unit for count, gone in zip(units, excess, strict=True)]
            unpacked = [count - gone for count, gone in zip(unpacked, excess, strict=True)]
        newest = int(not self._before)  # read in full precision if it is quantised after its attention
        return store.read_nbytes(units, [count + newest for count in unpacked])

    def nbytes(self) -> tuple[int, int]:
        """Return (bytes of packed entries and residuals, bytes of scales, minima and positions)."""
        store_bytes, positions = (self._keys.nbytes(), self._values.nbytes()), self.positions
        position_bytes = 0 if positions is None else positions.nbytes
        return sum(data for data, _ in store_bytes), sum(metadata for _, metadata in store_bytes) + position_bytes

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "a quantised layer holds one sequence after its prefill, and entries can only be appended; use greedy decoding "
            "of one prompt at a time"
        )

    retain = drop = forget = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = _refuse


def _group_equal(keys: Sequence[Key]) -> list[tuple[list[int], Key]]:
    """Group the indices of equal keys: `[([index, ...], key), ...]`."""
    groups: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return [(rows, key) for key, rows in groups.items()]

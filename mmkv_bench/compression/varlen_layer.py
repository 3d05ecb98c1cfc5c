"""Compressed layer whose heads have different lengths, stored back to back: `[sum of lengths, D]`, without padding.

While a prompt is prefilled the layer works like any `CompressedLayer`. When heads or rows keep different numbers of
entries it is folded: each head of each row becomes a sequence of its own, with slack for new tokens after it. Attention
reads these sequences in place, by torch's `varlen_attn`, which has kernels for CUDA devices in half precision only;
elsewhere heads are padded (`compression/cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression.cache import CompressedLayer, Kernel, Reduce
from mmkv_bench.compression.flash import WIDEST_HEAD
from mmkv_bench.errors import UnsupportedError

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


def folds(place: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Tell whether the device has a kernel that reads folded heads."""
    return (
        dtype in DTYPES and head_dim % 8 == 0 and head_dim <= WIDEST_HEAD and devices.at(place).reads_heads_back_to_back
    )


class VarlenLayer(CompressedLayer):
    """The entries of one layer for `B` sequences, without padding once `folded`.

    Sequence `b * Hkv + h` is head h of row b; there are N of them.

    Attributes:
        folded: the storage is `[slots, D]`, with positions `[slots]`; `keys`, `values` and `positions` then return padded
            copies.
        stored: filled slots of the longest sequence.
    """

    _heads: tuple[int, int]  # B, Hkv
    _lengths: list[int]  # entries of each sequence when it was folded
    _slack: int  # slots after each sequence; `_appended` of them are filled
    _appended: int
    _starts: Tensor  # int32 [N + 1], where each sequence begins, and the end of the last one's slack
    _used: Tensor  # int32 [N], filled slots
    _ends: Tensor  # int64 [N], where each sequence's next token goes

    def _clear(self) -> None:
        self.folded = False
        super()._clear()

    @property
    def back_to_back(self) -> bool:  # type: ignore[override]
        return self.folded

    # ------------------------------------------------------------------ padded and back to back
    def retain(
        self, index: Tensor, reduce: Reduce | Sequence[Reduce], reserve: int | None = None, forget: int = 0
    ) -> None:
        """Keep the slots `index` only, see `CompressedLayer.retain`. Fold the layer if heads then differ in length."""
        self._unfold()
        super().retain(index, reduce, reserve, forget)
        self._fold()

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Tensor, Tensor, Tensor | None]], seen: int, reserve: int) -> Self:
        """Build a layer for several sequences, see `CompressedLayer.from_rows`. Fold it if heads or rows differ in length."""
        layer = super().from_rows(rows, seen, reserve)
        layer._fold()
        return layer

    def _fold(self) -> None:
        if not self.ragged:
            return
        old_positions, stored = self._position_storage, self.stored
        assert old_positions is not None, "ragged heads have positions"
        self._heads = old_positions.shape[0], old_positions.shape[1]
        self._slack, self._appended = self.capacity - stored, 0
        lengths = (old_positions[:, :, :stored] >= 0).sum(-1).flatten()
        ends = (lengths + self._slack).cumsum(0)
        starts = torch.nn.functional.pad(ends, (1, 0))
        self._lengths, first = lengths.tolist(), starts.tolist()
        self._starts, self._used, self._ends = starts.int(), lengths.int(), starts[:-1] + lengths

        def pack(padded: Tensor) -> Tensor:
            flat = padded.new_zeros(first[-1], *padded.shape[3:])
            for one, start, length in zip(padded.flatten(0, 1), first[:-1], self._lengths, strict=True):
                flat[start : start + length] = one[stored - length : stored]
            return flat

        super()._map(pack)
        self.folded, self.ragged = True, False

    def _unfold(self) -> None:
        if not self.folded:
            return
        super()._map(self._padded)
        self.folded, self.ragged = False, True

    def _padded(self, flat: Tensor) -> Tensor:
        """Return a folded storage as `[B, Hkv, stored + free slack, ...]`, padded on the left with 0 (positions: with -1)."""
        free_slots = self._slack - self._appended
        padded = flat.new_full(
            (len(self._lengths), self.stored + free_slots, *flat.shape[1:]), -1 if flat.ndim == 1 else 0
        )
        for one, start, length in zip(padded, self._starts.tolist()[:-1], self._lengths, strict=True):
            filled = length + self._appended
            one[self.stored - filled : self.stored] = flat[start : start + filled]
        return padded.unflatten(0, self._heads)

    def _read_keys(self) -> Tensor:
        return self._padded(self._key_storage)[:, :, : self.stored] if self.folded else super()._read_keys()

    def _read_values(self) -> Tensor:
        return self._padded(self._value_storage)[:, :, : self.stored] if self.folded else super()._read_values()

    @property
    def positions(self) -> Tensor | None:
        if not self.folded or self._position_storage is None:
            return super().positions
        return self._padded(self._position_storage)[:, :, : self.stored]

    @property
    def capacity(self) -> int:
        return self.stored + self._slack - self._appended if self.folded else super().capacity

    # ------------------------------------------------------------------ decoding
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, Hkv, n, D]` of the next n tokens; return all stored keys and values.

        A folded layer returns only the new ones, because `attention` reads all entries from the storage.
        """
        if not self.folded:
            return super().update(key_states, value_states, *args, **kwargs)
        n_new = key_states.shape[2]
        if self._appended + n_new > self._slack:
            self._unfold()
            self._make_room(n_new)
            self._fold()
        offsets = torch.arange(n_new, device=self._ends.device)
        slots = (self._ends[:, None] + offsets).flatten()
        assert self._position_storage is not None
        self._key_storage.index_copy_(0, slots, key_states.flatten(0, 2))
        self._value_storage.index_copy_(0, slots, value_states.flatten(0, 2))
        self._position_storage.index_copy_(0, slots, (self.seen + offsets).int().repeat(len(self._lengths)))
        self._move_on(n_new)
        return key_states, value_states

    def _move_on(self, count: int) -> None:
        self._ends += count
        self._used += count
        self._appended += count
        self.stored += count
        self.seen += count

    def attention(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run attention on the layer, see `CompressedLayer.attention`. A folded layer calls the kernel `attend`."""
        if not self.folded:
            return super().attention(kernel, query, key, value, mask)
        if mask is not None and query.shape[2] > 1:
            self._check(mask)
        return kernel(query, self)

    def sequences(self) -> Sequences:
        """Return the folded storage in the form that the kernel reads."""
        return Sequences(self._key_storage, self._value_storage, self._starts, self._used, self.stored, self._heads)

    def _check(self, mask: Tensor) -> None:
        """Raise UnsupportedError if a mask hides stored entries, as after padding questions of several lengths."""
        positions = self.slot_positions().flatten(1)
        visible = mask[:, 0, -1].expand(len(positions), -1).gather(1, positions.clamp_min(0))
        if bool((~visible & (positions >= 0)).any()):
            raise UnsupportedError(
                "the attention mask hides tokens of a question that is fed to reduced entries; feed questions of "
                "equal length, without padding"
            )

    def forget(self, count: int) -> None:
        if self.folded:
            self._move_on(-count)
        else:
            super().forget(count)

    def replace(self, keys: Tensor, values: Tensor) -> None:
        self._unfold()
        super().replace(keys, values)
        self._fold()

    def drop(self, slots: Tensor) -> None:
        raise UnsupportedError(
            "a layer whose heads are stored back to back cannot evict while decoding; open the session with packs=False"
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._unfold()
        super()._map(change)
        self.ragged = self._position_storage is not None and bool(
            (self._position_storage[:, :, : self.stored] < 0).any()
        )
        self._fold()

    # ------------------------------------------------------------------ audit
    def entries(self) -> Tensor:
        if not self.folded:
            return super().entries()
        return (torch.tensor(self._lengths) + self._appended).unflatten(0, self._heads)

    def nbytes(self) -> tuple[int, int]:
        """Return (bytes of entries, bytes of their positions), see `CompressedLayer.nbytes`."""
        if not self.folded:
            return super().nbytes()
        assert self._position_storage is not None
        count = int(self.entries().sum())
        return count * self.slot_nbytes, count * self._position_storage.element_size()

    def buffers(self) -> list[Tensor]:
        return super().buffers() + ([self._starts, self._used, self._ends] if self.folded else [])

    def padding_nbytes(self) -> int:
        return 0 if self.folded else super().padding_nbytes()

    def read_nbytes(self, fed: int) -> int:
        if not self.folded:
            return super().read_nbytes(fed)
        return (int(self.entries().sum()) + len(self._lengths) * (fed + 1)) * self.slot_nbytes

    def single_row(self, row: int, slack: int) -> CompressedLayer:
        """Return a layer of the size that one row of a folded layer would have if stored alone, with `slack` free slots per head.

        Only for counting bytes: the slots do not contain the row's entries in order.
        """
        heads = self._heads[1]
        row_heads = slice(row * heads, (row + 1) * heads)
        lengths = [length + self._appended for length in self._lengths[row_heads]]
        size, start = sum(lengths) + heads * slack, int(self._starts[row * heads])
        equal_lengths = len(set(lengths)) == 1
        layer: CompressedLayer = CompressedLayer(self.reserve) if equal_lengths else VarlenLayer(self.reserve)
        for name in ("_key_storage", "_value_storage", "_position_storage"):
            flat = getattr(self, name)[start : start + size]
            setattr(layer, name, flat.view(1, heads, lengths[0] + slack, *flat.shape[1:]) if equal_lengths else flat)
        layer.dtype, layer.device, layer.is_initialized = self.dtype, self.device, True
        layer.stored, layer.seen = max(lengths), self.seen
        if isinstance(layer, VarlenLayer):
            layer.folded, layer._heads, layer._lengths = True, (1, heads), lengths
            layer._slack, layer._appended = slack, 0
            layer._starts, layer._used, layer._ends = (
                self._starts[: heads + 1],
                self._used[row_heads],
                self._ends[row_heads],
            )
        return layer


class Sequences(NamedTuple):
    """Tensors of a layer whose N = B * Hkv heads are stored one after the other, in the form that `attend` reads."""

    keys: Tensor  # [slots, D]
    values: Tensor  # [slots, D]
    starts: Tensor  # int32 [N + 1], where each sequence begins
    used: Tensor  # int32 [N], filled slots of each sequence
    longest: int  # most filled slots of a sequence
    heads: tuple[int, int]  # B and Hkv


def attend(module: Any, query: Tensor, layer: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """Attend by torch's `varlen_attn`: each query sees the entries of its head up to its own slot.

    Args:
        query: `[B, Hq, n, D]` of the n newest tokens.
        layer: its `sequences()` already include the new tokens.

    Returns:
        Output `[B, n, Hq, D]`, and None for the weights.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    read: Sequences = layer.sequences()
    (batch, heads), n_queries = read.heads, query.shape[2]
    queries = query.unflatten(1, (heads, -1)).transpose(2, 3).flatten(0, 1).flatten(0, 1)  # [N n, Hq / Hkv, D]
    # Flash: its kernel takes the start and the filled length of each sequence, and reads no further.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = varlen_attn(
            queries,
            read.keys[:, None],
            read.values[:, None],
            torch.arange(0, batch * heads * n_queries + 1, n_queries, dtype=torch.int32, device=query.device),
            read.starts,
            n_queries,
            read.longest,
            scale=scaling,
            window_size=(-1, 0) if n_queries > 1 else (-1, -1),
            enable_gqa=True,
            seqused_k=read.used,
        )
    assert isinstance(output, Tensor), "nothing else was asked for"
    return output.unflatten(0, (batch, heads, n_queries)).transpose(1, 2).flatten(2, 3), None

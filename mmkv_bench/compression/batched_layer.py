"""Layers that join single-sequence caches, prefilled and compressed one by one, into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmkv_bench.compression import states
from mmkv_bench.compression.cache import CompressedCache, CompressedLayer, Kernel
from mmkv_bench.compression.varlen_layer import VarlenLayer


class BatchedLayer(CompressedLayer):
    """One layer of several sequences that have all been shown the same number of tokens.

    `rows` are layers of one sequence each. Each stores its own entries, exactly as when its sequence decodes alone.
    """

    def __init__(self, rows: Sequence[CompressedLayer]):
        super().__init__()
        self.rows = list(rows)
        self.seen, self.is_initialized = rows[0].seen, True
        self._entries: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append row i of keys and values `[R, Hkv, n, D]` to layer i; return both unchanged (`attention` reads the layers)."""
        self._entries = [
            row.update(key_states[i : i + 1], value_states[i : i + 1], *args, **kwargs)
            for i, row in enumerate(self.rows)
        ]
        self.seen += key_states.shape[2]
        return key_states, value_states

    def attention(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, None]:
        """Attend row by row, as if each sequence were alone; no entries are copied for padding."""
        outputs = []
        for i, (row, (own_key, own_value)) in enumerate(zip(self.rows, self._entries, strict=True)):
            own_mask = mask if mask is None or mask.shape[0] == 1 else mask[i : i + 1]
            outputs.append(row.attention(kernel, query[i : i + 1], own_key, own_value, own_mask)[0])
        self._entries = []
        return torch.cat(outputs), None

    def attended(self, query: Tensor, scaling: float) -> None:
        for i, row in enumerate(self.rows):
            row.attended(query[i : i + 1], scaling)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = [self.rows[i] for i in indices.tolist()]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def entries(self) -> Tensor:
        return torch.cat([row.entries() for row in self.rows])

    def reachable(self) -> Tensor:
        return torch.cat([row.reachable() for row in self.rows])

    def nbytes(self) -> tuple[int, int]:
        data, metadata = zip(*(row.nbytes() for row in self.rows), strict=True)
        return sum(data), sum(metadata)

    def host_nbytes(self) -> int:
        return sum(row.host_nbytes() for row in self.rows)

    def buffers(self) -> list[Tensor]:
        return [tensor for row in self.rows for tensor in row.buffers()]

    def padding_nbytes(self) -> int:
        return sum(row.padding_nbytes() for row in self.rows)

    def read_nbytes(self, fed: int) -> int:
        return sum(row.read_nbytes(fed) for row in self.rows)

    def moved_nbytes(self) -> int:
        return sum(row.moved_nbytes() for row in self.rows)


def join(caches: Sequence[CompressedCache], reserve: int, stepwise: bool = False) -> CompressedCache:
    """Return one cache with the rows of several caches. The given caches are emptied.

    Layers are joined one by one, so at most one layer is in memory twice. If lengths differ, shorter heads are padded on
    the left, or stored back to back if the device can read them so. Layers with the state of a decode policy are not
    merged: a `BatchedLayer` stores them side by side.

    Args:
        caches: must all have been shown the same number of tokens, unless `stepwise`.
        reserve: number of slots that will be appended (a decode policy's layer has reserved them itself).
        stepwise: only one token per row will be fed at a time. Such a token sees every entry of its row, so rows may have
            been shown different numbers of tokens.
    """
    layers: list[Any] = []
    while caches[0].layers:
        rows = [cache.layers.pop(0) for cache in caches]
        layers.append(
            _joined(rows, reserve, stepwise) if isinstance(rows[0], CompressedLayer) else states.concatenate(rows)
        )
    return CompressedCache.of(layers)


def _joined(layers: Sequence[CompressedLayer], reserve: int, stepwise: bool) -> CompressedLayer:
    seen, kind = {layer.seen for layer in layers}, type(layers[0])
    kept_apart = kind not in (CompressedLayer, VarlenLayer)
    if kept_apart or not stepwise:
        assert len(seen) == 1, f"sequences of one batch have been shown the same number of tokens, not {sorted(seen)}"
    if kept_apart:
        return BatchedLayer(layers)
    complete = len(seen) == 1 and all(layer.positions is None for layer in layers)
    rows: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for layer in layers:
        positions = [None] * len(layer.keys) if complete else layer.slot_positions()
        rows += zip(layer.keys, layer.values, positions, strict=True)
    return kind.from_rows(rows, max(seen), reserve)

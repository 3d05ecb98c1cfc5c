"""Forks of one prefill: selecting what each cell keeps, gathering it into batches, and borrowing the full cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.generation.prefill import Prefilled, score_key
from mmkv_bench.generation.result import CellSpec, ForkResult, digest

POSITION_BYTES = 4  # int32 per slot and KV head
SMALL = 512  # slots: forks up to this length decode in one batch, longer ones with forks of like length


@dataclass
class Fork:
    """One cell's share of a prefill. `index` is None when everything stays (the full cache is borrowed then)."""

    cell: CellSpec
    index: list[Tensor] | None
    result: ForkResult
    compress_s: float = 0.0

    @property
    def length(self) -> int:
        return max((i.shape[1] for i in self.index), default=0)

    def bucket(self) -> int:
        return (max(self.length, SMALL) - 1).bit_length()


def plan(prefilled: Prefilled, cell: CellSpec, result: ForkResult) -> Fork:
    """Choose what the cell keeps of this prompt; raises what the method raises."""
    length = prefilled.length
    if cell.keeps_all(length):
        return Fork(cell, None, result)
    key = score_key(cell, length)
    if key in prefilled.failures:
        raise prefilled.failures[key]
    start = time.perf_counter()
    strict = cell.protocol == "strict"
    scores = prefilled.scores[key]
    index = cell.compressor.select(
        scores,
        cell.entries(length),
        prefilled.prompt.types[0],
        range(len(scores)),
        len(scores),
        strict,
        prefilled.order(key, cell.compressor.selector, length - 1 if strict else length),
    )
    return Fork(cell, index, result, prefilled.score_seconds[key] + time.perf_counter() - start)


def batches(
    forks: Sequence[Fork], prefilled: Prefilled, reserve: int, rows: int, limit_bytes: int | None
) -> Iterator[list[Fork]]:
    """Split forks into decode batches: one protocol and length bucket each, at most `rows` rows and `limit_bytes`.

    Bytes are those that `gather` allocates: every row as long as the longest, slack and positions included. A fork
    that exceeds the limit by itself still gets a batch of its own.
    """
    groups: dict[tuple, list[Fork]] = {}
    for fork in forks:
        groups.setdefault((fork.cell.protocol, fork.bucket()), []).append(fork)
    key = prefilled.cache.layers[0].keys
    slot = key.shape[1] * (2 * key.shape[3] * key.element_size() + POSITION_BYTES)
    for members in groups.values():
        batch, widest = [], [0] * len(prefilled.cache.layers)
        for fork in members:
            wider = [max(width, index.shape[1]) for width, index in zip(widest, fork.index, strict=True)]
            size = (len(batch) + 1) * sum(width + reserve for width in wider) * slot
            if batch and (len(batch) == rows or (limit_bytes is not None and size > limit_bytes)):
                yield batch
                batch, wider = [], [index.shape[1] for index in fork.index]
            batch.append(fork)
            widest = wider
        yield batch


def gather(prefilled: Prefilled, forks: Sequence[Fork], reserve: int) -> CompressedCache:
    """The forks' reduced entries as one cache with a row each. The prefill is only read."""
    seen = prefilled.length - (forks[0].cell.protocol == "strict")
    layers = []
    for number, source in enumerate(prefilled.cache.layers):
        key, value = source.keys[0], source.values[0]
        rows = []
        for fork in forks:
            index = fork.index[number]
            rows.append((*fork.cell.compressor.reducer.reduce(key, value, index), index))
        layers.append(CompressedLayer.from_rows(rows, seen, reserve))
    return CompressedCache.of(layers)


@contextmanager
def borrow(prefilled: Prefilled, strict: bool) -> Iterator[CompressedCache]:
    """The full cache itself, to be decoded from: new tokens go to its slack, and afterwards it is what it was."""
    layers = prefilled.cache.layers
    saved = [(layer.stored, layer.seen) for layer in layers]
    last = [(layer.keys[:, :, -1].clone(), layer.values[:, :, -1].clone()) for layer in layers] if strict else []
    try:
        if strict:
            for layer in layers:
                layer.forget_last()
        yield prefilled.cache
    finally:
        for layer, (stored, seen) in zip(layers, saved, strict=True):
            layer.stored, layer.seen = stored, seen
        for layer, (key, value) in zip(layers, last, strict=False):
            layer.keys[:, :, -1], layer.values[:, :, -1] = key, value


def audit(fork: Fork, entries: Sequence[Tensor], prefilled: Prefilled) -> None:
    """Fill the fork's result with what its stored tensors hold before anything is appended.

    Args:
        entries: per layer int64 `[Hkv]`, counted from the tensors of the fork's row.

    Under `strict` the re-fed last prompt token, one entry per head, is counted: it is part of C.
    """
    result, strict = fork.result, fork.cell.protocol == "strict"
    layers = prefilled.cache.layers
    kept = [(count + int(strict)).tolist() for count in entries]
    key = layers[0].keys
    heads, slot = key.shape[1], 2 * key.shape[3] * key.element_size()
    full = prefilled.length * heads * len(layers) * slot
    if fork.index is None:
        stored = [prefilled.length] * len(layers)
        index = [torch.arange(prefilled.length - int(strict)).expand(heads, -1)] * len(layers)
    else:
        stored = [i.shape[1] + int(strict) for i in fork.index]
        index = fork.index
    result.kept, result.kept_digest = kept, digest(index)
    result.entries_resident = result.entries_reachable = sum(map(sum, kept))
    result.bytes_device = sum(stored) * heads * slot
    result.bytes_metadata = 0 if fork.index is None else sum(stored) * heads * POSITION_BYTES
    result.bytes_full = full
    result.entries_planned = sum(int((i >= 0).sum()) for i in index) + int(strict) * heads * len(layers)

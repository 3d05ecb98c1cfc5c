"""A row's account of one cell and one prompt: what was asked, what is stored, what the answer came from.

The fork engine and the single run (`sharing=off`) fill it here, from the same counts of `compression/account.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmkv_bench.compression.account import LayerAccount
from mmkv_bench.generation.result import CellSpec, ForkResult, digest
from mmkv_bench.protocols import Lengths
from mmkv_bench.store.kept import packed

POSITION_BYTES = 4  # int32 per slot and KV head


def fill_asked(result: ForkResult, cell: CellSpec, lengths: Lengths, heads: int, types: Tensor | None) -> None:
    """What the cell asks of the prompt, and what it cannot do there.

    Args:
        heads: KV heads of all layers; types: int `[>= T]` token types, None when unknown.
    """
    length, compressor = lengths.reduced, cell.compressor
    entries = cell.entries(length)
    result.budget_entries = None if compressor.unbudgeted else entries
    result.entries_asked = None if compressor.unbudgeted else min(entries, length) * heads
    result.entries_appended = lengths.appended * heads
    result.fallback = list(compressor.fallbacks(entries, length, None if types is None else types[:length]))
    if cell.evicts(length):
        result.window_effective = compressor.eviction.scorer.window_effective(entries, length)


def fill_stored(
    result: ForkResult,
    cell: CellSpec,
    lengths: Lengths,
    index: Sequence[Tensor],
    layers: Sequence[LayerAccount],
    slot: int,
) -> None:
    """What the cell's layers hold right after the reduction.

    Tokens that are fed again and are part of C (the last one under `strict`) are counted, one entry each per head.

    Args:
        index: per layer int64 `[Hkv, m]` of what was selected; slot: bytes of one head's key and value.
    """
    refed, heads = lengths.refed, index[0].shape[0] * len(index)
    result.selected = [one.to("cpu", torch.int32) for one in index]
    kept = torch.stack([one.entries for one in layers]) + refed
    result.kept, result.kept_digest = kept.tolist(), digest(result.selected)
    result.entries_planned = int((torch.cat(result.selected, 1) >= 0).sum()) + refed * heads
    result.entries_resident = int(kept.sum())
    result.entries_reachable = int(torch.stack([one.reachable for one in layers]).sum()) + refed * heads
    if cell.keep_indices:
        places = [[head[head >= 0].numpy() for head in layer] for layer in result.selected]
        result.kept_indices = packed(places, lengths.reduced)
    result.bytes_device = sum(one.device for one in layers) + refed * heads * slot
    result.bytes_metadata = sum(one.metadata for one in layers)
    if not cell.keeps_all(lengths.reduced):
        result.bytes_metadata += refed * heads * POSITION_BYTES
    result.bytes_host = sum(one.host for one in layers)
    result.bytes_full = lengths.reduced * heads * slot
    result.bytes_held = sum(one.held for one in layers)
    result.bytes_padding = sum(one.padding for one in layers)
    result.bytes_read_step = sum(one.read for one in layers)
    result.bytes_moved_step = sum(one.moved for one in layers)


def fill_answer(
    result: ForkResult, cell: CellSpec, lengths: Lengths, tokens: Sequence[int], finish: str | None, text: str
) -> None:
    """What was answered, and how much of it from the reduced cache."""
    result.token_ids, result.n_tokens = list(tokens), len(tokens)
    result.finish_reason, result.answer = finish, text
    from_full = result.n_tokens if cell.keeps_all(lengths.reduced) else cell.tokens_from_full
    result.tokens_from_compressed = max(result.n_tokens - from_full, 0)

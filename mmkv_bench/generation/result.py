"""Cells, their results for one prompt, and functions that fill the results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor, NonFiniteScoreError
from mmkv_bench.compression.entry_counts import LayerAccount
from mmkv_bench.errors import GenerationTimeout, MMKVError, out_of_memory
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.protocols import DEFAULT, READ_AS_ASKED, Lengths, StreamSettings, protocol
from mmkv_bench.store.response import Response, pack_kept


@dataclass(frozen=True)
class CellSpec:
    """A cell: one (method, budget, protocol, seed) setting with which prompts are answered.

    Attributes:
        cell: the cell's name (a hash in runs).
        compressor: the method.
        budget: None for the full cache.
        keep_indices: whether rows store the indices of kept entries.
        stream: settings of `protocol=stream`.
    """

    cell: str
    compressor: Compressor
    budget: Budget | None
    protocol: str = DEFAULT
    seed: int = 0
    keep_indices: bool = False
    stream: StreamSettings = READ_AS_ASKED

    def entries(self, length: int) -> int:
        """Return the budget C in entries per KV head for `length` prompt (or context) tokens; `length` for the full cache."""
        return length if self.budget is None else self.budget.entries_for(length)

    def evicts(self, length: int) -> bool:
        """Tell whether the prompt is longer than the budget, so that entries must be evicted."""
        return self.entries(length) < length

    def keeps_all(self, length: int) -> bool:
        """Tell whether the full cache of a prompt of `length` tokens is used unchanged."""
        return not self.evicts(length) and not self.compressor.quantises

    @property
    def serves_all_questions(self) -> bool:
        """Whether one compressed cache of a document serves all questions about the document."""
        return protocol(self.protocol).serves_all_questions(self.compressor.needs.answer)

    @property
    def tokens_from_full(self) -> int:
        """Number of first answer tokens that come from the full cache, set by the protocol or the decode policy."""
        policy = self.compressor.decoding
        return max(protocol(self.protocol).from_prefill, 0 if policy is None else policy.tokens_from_full)


class ForkResult(Response):
    """One cell's result for one prompt: the columns of the response row that generation fills.

    Attributes:
        selected: kept indices per layer, int32 `[Hkv, m]` in host memory, ascending, padded on the left with -1; None if not
            counted. Not a column of the row.
    """

    selected: Sequence[Tensor] | None = None  # a class attribute, not a field of the row


def blank(cell: CellSpec, prompt: EncodedPrompt, **circumstances: Any) -> ForkResult:
    """Return a cell's result before the answer, with the columns of the prompt and of `circumstances` (column -> value)."""
    return ForkResult(
        cell.cell,
        prompt_tokens=prompt.length,
        context_tokens=prompt.length,
        visual_tokens=prompt.visual_tokens,
        encode_s=prompt.encode_s,
        **circumstances,
    )


def digest(kept: Sequence[Tensor]) -> str:
    """Return a digest of the kept indices of all layers and heads, 16 hex digits.

    kept: int64 `[Hkv, m]` per layer, ascending, padded on the left with -1.
    """
    running = hashlib.sha256()
    for index in kept:
        layer = index.to("cpu", torch.int32).numpy()
        for head, padding in zip(layer, (layer < 0).sum(-1), strict=True):
            running.update(head[padding:].tobytes() + b"|")
    return running.hexdigest()[:16]


class NonFiniteLogitsError(MMKVError):
    """The model gave NaN logits; the row gets status `nan`."""


def status_of(error: BaseException) -> str:
    """Return the row status of an exception: `oom`, `timeout`, `nan` or `error`."""
    if isinstance(error, torch.OutOfMemoryError) or out_of_memory(error):
        return "oom"
    if isinstance(error, (NonFiniteScoreError, NonFiniteLogitsError)):
        return "nan"
    return "timeout" if isinstance(error, GenerationTimeout) else "error"


def describe(error: BaseException) -> str:
    """Return an exception's class and the first line of the message, for the column `error`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__


POSITION_BYTES = 4  # int32 per slot and KV head


def fill_asked(result: ForkResult, cell: CellSpec, lengths: Lengths, heads: int, types: Tensor | None) -> None:
    """Fill the columns of a cell's requested budget for a prompt, and the method's fallbacks.

    heads: number of KV heads of all layers together. types: token types, int `[>= T]`; None if unknown.
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
    state: int = 0,
) -> None:
    """Fill the columns of a cell's stored entries and bytes right after the reduction.

    Each token that is fed again and counts against the budget C (the last token under `strict`) counts as one entry per KV head.

    Args:
        index: the selected entries, int64 `[Hkv, m]` per layer.
        layers: counts of each layer.
        slot: bytes of one token's key and value in one KV head.
        state: bytes of layers that are not compressed.
    """
    refed, heads = lengths.refed, index[0].shape[0] * len(index)
    result.selected = [one.to("cpu", torch.int32) for one in index]
    kept_counts = torch.stack([one.entries for one in layers]) + refed
    result.kept, result.kept_digest = kept_counts.tolist(), digest(result.selected)
    result.entries_planned = int((torch.cat(result.selected, 1) >= 0).sum()) + refed * heads
    result.entries_resident = int(kept_counts.sum())
    result.entries_reachable = int(torch.stack([one.reachable for one in layers]).sum()) + refed * heads
    if cell.keep_indices:
        kept_places = [[head[head >= 0].numpy() for head in layer] for layer in result.selected]
        result.kept_indices = pack_kept(kept_places, lengths.reduced)
    result.bytes_device = sum(one.device for one in layers) + refed * heads * slot
    result.bytes_metadata = sum(one.metadata for one in layers)
    if not cell.keeps_all(lengths.reduced):
        result.bytes_metadata += refed * heads * POSITION_BYTES
    result.bytes_host = sum(one.host for one in layers)
    result.bytes_full = lengths.reduced * heads * slot
    result.bytes_state = state
    result.bytes_held = sum(one.held for one in layers) + state
    result.bytes_padding = sum(one.padding for one in layers)
    result.bytes_read_step = sum(one.read for one in layers) + state
    result.bytes_moved_step = sum(one.moved for one in layers)


def fill_answer(
    result: ForkResult, cell: CellSpec, lengths: Lengths, tokens: Sequence[int], finish: str | None, text: str
) -> None:
    """Fill the columns of the answer, and the number of answer tokens that come from the reduced cache."""
    result.token_ids, result.n_tokens = list(tokens), len(tokens)
    result.finish_reason, result.answer = finish, text
    from_full = result.n_tokens if cell.keeps_all(lengths.reduced) else cell.tokens_from_full
    result.tokens_from_compressed = max(result.n_tokens - from_full, 0)

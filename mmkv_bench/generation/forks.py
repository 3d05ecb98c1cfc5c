"""Forks of one prefill: select the entries that each cell keeps, copy these into batches, and lend the full cache.

Scorers that need the full cache's answer get it from a separate decode, whose whole time counts as theirs. The cell `full` is
therefore not slowed by collecting attention.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression import states
from mmkv_bench.compression.batched_layer import BatchedLayer
from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.entry_counts import LayerAccount, account, accounts
from mmkv_bench.compression.listeners import AnswerAttention
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.session import Session
from mmkv_bench.generation.decode import decode
from mmkv_bench.generation.prefill import Key, Prefilled, PrefillGroup, score_key, summary_key
from mmkv_bench.generation.result import POSITION_BYTES, CellSpec, ForkResult, GenerationTimeout, fill_stored

SMALL = 512  # slots: forks up to this length share batches; longer forks share batches with forks of similar length


@dataclass
class Fork:
    """The entries from which one cell decodes after a prefill that several cells share.

    Attributes:
        index: indices of kept entries, int64 `[Hkv, m]` per layer; None if the cell borrows the full cache.
        compress_s: seconds of scoring, selecting and the second prefill.
        again: kept keys and values `[Hkv, m, D]` per layer from a second prefill, if the protocol has one.
        group: the shared prefill and the prompt; set by the engine.
    """

    cell: CellSpec
    index: list[Tensor] | None
    result: ForkResult
    compress_s: float = 0.0
    again: list[tuple[Tensor, Tensor]] | None = None
    group: PrefillGroup = field(init=False, repr=False)

    @property
    def chosen(self) -> list[Tensor]:
        """`index` of a fork that does not borrow the full cache."""
        assert self.index is not None, "a fork that keeps everything borrows the full cache"
        return self.index

    @property
    def length(self) -> int:
        return max((i.shape[1] for i in self.chosen), default=0)

    def bucket(self) -> int:
        return (max(self.length, SMALL) - 1).bit_length()


def plan(prefilled: Prefilled, cell: CellSpec, result: ForkResult) -> Fork:
    """Select the entries that a cell keeps, and return the fork. Raises the method's errors. result: gets the fallbacks."""
    lengths = prefilled.lengths[cell.protocol]
    if cell.keeps_all(lengths.reduced):
        return Fork(cell, None, result)
    if not cell.evicts(lengths.reduced):
        layers = prefilled.cache.compressed
        all_indices = torch.arange(lengths.candidates, device=layers[0].keys.device).expand(layers[0].keys.shape[1], -1)
        return Fork(cell, [all_indices] * len(layers), result)
    key, summary = score_key(cell, lengths), summary_key(cell, lengths)
    for name in (key, summary):
        if name is not None and name in prefilled.failures:
            raise prefilled.failures[name]
    if cell.cell in prefilled.selections:
        index, seconds, fallbacks = prefilled.selections[cell.cell]
        result.fallback = list(dict.fromkeys([*result.fallback, *fallbacks]))
        return Fork(cell, index, result, seconds)
    clock = devices.at(prefilled.logits.device).now
    start = clock()
    scores, context = prefilled.scores[key], _context(prefilled, cell)
    index = cell.compressor.select(
        scores,
        context.budget,
        context.types,
        range(len(scores)),
        len(scores),
        context.refed,
        prefilled.order(key, cell.compressor.eviction.selector, context.candidates),
        context.summaries,
        context.length,
        context.asked,
    )
    answer_fallback_names = cell.compressor.answer_fallbacks(prefilled.answer_steps.get(cell.protocol, 0))
    fallbacks = [*prefilled.fallbacks[key], *cell.compressor.outcome(context), *answer_fallback_names]
    result.fallback = list(dict.fromkeys([*result.fallback, *fallbacks]))
    seconds = prefilled.score_seconds[key] + (0.0 if summary is None else prefilled.score_seconds[summary])
    seconds += clock() - start
    if prefilled.shared:
        prefilled.selections[cell.cell] = index, seconds, fallbacks
    return Fork(cell, index, result, seconds)


def check_time(fork: Fork, timeout_s: float | None) -> None:
    """Raise GenerationTimeout if scoring and selecting took longer than `timeout_s`."""
    if timeout_s is not None and fork.compress_s > timeout_s:
        raise GenerationTimeout(f"scoring took {fork.compress_s:.1f} s, more than timeout_s")


def batches(forks: Sequence[Fork], rows: int, limit_bytes: int | None) -> Iterator[list[Fork]]:
    """Yield decode batches of forks: one protocol and length bucket each, at most `rows` rows and `limit_bytes` bytes.

    Forks for several questions about one document share batches, unless they have decode policies. The bytes are those that
    `gather` allocates: every row is as long as the longest row; spare slots and positions count. A fork that exceeds
    the limit gets its own batch.
    """
    groups: dict[tuple, list[Fork]] = {}
    for fork in forks:
        policy = fork.cell.compressor.decoding
        if policy is not None and policy.moves_queries:
            yield [fork]
            continue
        batch_key = None if policy is None else fork.group
        groups.setdefault((fork.cell.protocol, fork.bucket(), batch_key), []).append(fork)
    for members in groups.values():
        layers = members[0].group.prefilled.cache.compressed
        key = layers[0].keys
        slot = key.shape[1] * (2 * key.shape[3] * key.element_size() + POSITION_BYTES)
        batch: list[Fork] = []
        widest, reserve = [0] * len(layers), max(fork.group.reserve(fork.cell.protocol) for fork in members)
        for fork in members:
            new_widths = [max(width, index.shape[1]) for width, index in zip(widest, fork.chosen, strict=True)]
            size = (len(batch) + 1) * sum(width + reserve for width in new_widths) * slot
            if batch and (len(batch) == rows or (limit_bytes is not None and size > limit_bytes)):
                yield batch
                batch, new_widths = [], [index.shape[1] for index in fork.chosen]
            batch.append(fork)
            widest = new_widths
        yield batch


def _context(prefilled: Prefilled, cell: CellSpec) -> Context:
    lengths = prefilled.lengths[cell.protocol]
    key = summary_key(cell, lengths) if cell.evicts(lengths.reduced) else None
    summaries = None if key is None else prefilled.summaries.get(key)
    budget = min(cell.entries(lengths.reduced), lengths.reduced)
    types = prefilled.prompt.types[0][: lengths.reduced]
    asked_fraction = None if cell.budget is None else cell.budget.asked
    return Context(budget, lengths.reduced, lengths.refed, types, summaries or {}, asked_fraction)


def gather(prefilled: Prefilled, forks: Sequence[Fork], reserve: int) -> CompressedCache:
    """Return a cache with copies of the forks' reduced entries, one row per fork. reserve: spare slots for new tokens."""
    seen = prefilled.lengths[forks[0].cell.protocol].candidates
    types = prefilled.prompt.types[0][:seen]
    policies = [fork.cell.compressor.decoding for fork in forks]  # either all forks of a batch have policies, or none
    layers = []
    for number, source in enumerate(prefilled.cache.compressed):
        key, value = source.keys[0, :, :seen], source.values[0, :, :seen]
        kept_rows = _rows(forks, number, key, value, types)
        decoding_layers = [
            policy.layer(_start(prefilled, fork, number, key, value, row, reserve))
            for policy, fork, row in zip(policies, forks, kept_rows, strict=True)
            if policy is not None
        ]
        if not decoding_layers:
            layers.append(type(source).from_rows(kept_rows, seen, reserve))
        else:
            layers.append(decoding_layers[0] if len(decoding_layers) == 1 else BatchedLayer(decoding_layers))
    cache = prefilled.cache.like(layers, prefilled.states, len(forks))
    if policies[0] is not None and policies[0].moves_queries:
        cache.query_positions = policies[0].query_positions
    return cache


def _rows(
    forks: Sequence[Fork], layer: int, key: Tensor, value: Tensor, types: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return keys and values `[Hkv, m, D]` and indices `[Hkv, m]` that each fork keeps in one layer.

    key, value: the full cache's entries of this layer.
    """
    index_by_fork = [fork.chosen[layer] for fork in forks]
    if all(fork.again is None and type(fork.cell.compressor.reducer) is Evict for fork in forks):
        widths = [index.shape[1] for index in index_by_fork]  # unchanged entries: gathered for all forks at once
        keys, values = Evict().reduce(key, value, torch.cat(index_by_fork, 1), types)
        return list(zip(keys.split(widths, 1), values.split(widths, 1), index_by_fork, strict=True))
    rows = []
    for fork, index in zip(forks, index_by_fork, strict=True):
        reducer = fork.cell.compressor.reducer
        assert reducer is not None, "a method with entries of its own has a reducer"
        reduced = reducer.reduce(key, value, index, types) if fork.again is None else fork.again[layer]
        rows.append((*reduced, index))
    return rows


def _start(
    prefilled: Prefilled,
    fork: Fork,
    layer: int,
    key: Tensor,
    value: Tensor,
    row: tuple[Tensor, Tensor, Tensor],
    reserve: int,
) -> Start:
    """Return the state from which a fork's decode policy starts in one layer. row: the fork's row of `_rows`."""
    cell, lengths = fork.cell, prefilled.lengths[fork.cell.protocol]
    scores = prefilled.scores[score_key(cell, lengths)][layer] if cell.evicts(lengths.reduced) else None
    return Start(
        layer=layer,
        n_layers=len(prefilled.cache.compressed),
        key=key,
        value=value,
        index=row[2],
        kept_key=row[0],
        kept_value=row[1],
        scores=scores,
        context=_context(prefilled, cell),
        pad=0,
        seen=key.shape[1],
        acts_from=lengths.prompt,
        scaling=prefilled.scalings[layer],
        reserve=reserve,
    )


def copied(prefilled: Prefilled, protocol: str, reserve: int) -> CompressedCache:
    """Return a copy of the full cache that stores the positions of its slots, as a fork's cache does."""
    seen, layers = prefilled.lengths[protocol].candidates, []
    for source in prefilled.cache.compressed:
        key, value = source.keys[0, :, :seen], source.values[0, :, :seen]
        all_slots = torch.arange(seen, device=key.device).expand(key.shape[0], -1)
        layers.append(CompressedLayer.from_rows([(key, value, all_slots)], seen, reserve))
    return prefilled.cache.like(layers, prefilled.states)


@contextlib.contextmanager
def borrow(prefilled: Prefilled, protocol: str) -> Iterator[CompressedCache]:
    """Lend the full cache for decoding, and restore the cache after the `with` block.

    New tokens go into spare slots. Entries of tokens that will be fed again are dropped inside the block.
    """
    layers, lengths = prefilled.cache.compressed, prefilled.lengths[protocol]
    saved = [(layer.stored, layer.seen) for layer in layers]
    fed_again = slice(lengths.candidates, lengths.prefilled)
    dropped_entries = [(layer.keys[:, :, fed_again].clone(), layer.values[:, :, fed_again].clone()) for layer in layers]
    try:
        for layer in layers:
            layer.forget(lengths.forgotten)
        prefilled.cache.put_states(prefilled.states)
        yield prefilled.cache
    finally:
        for layer, (stored, seen) in zip(layers, saved, strict=True):
            layer.stored, layer.seen = stored, seen
        for layer, (key, value) in zip(layers, dropped_entries, strict=True):
            layer.keys[:, :, fed_again], layer.values[:, :, fed_again] = key, value


def audit(forks: Sequence[Fork], layers: Sequence[CompressedLayer], group: PrefillGroup) -> None:
    """Count entries and bytes of each fork before any token is appended, and write the counts into the fork's result.

    forks: one per row of the cache; forks that borrow the full cache share its only row.
    """
    lengths = group.prefilled.lengths[forks[0].cell.protocol]
    is_full, full_layer = forks[0].index is None, group.prefilled.cache.compressed[0]
    acting = not is_full and forks[0].cell.compressor.decoding is not None
    reserve, rows = group.room(forks[0].cell.protocol), 1 if is_full else len(forks)

    def counted(layer: CompressedLayer) -> list[LayerAccount]:
        if not acting:
            return accounts(layer, reserve, [lengths.fed] * rows)
        return [account(row, lengths.fed) for row in (layer.rows if isinstance(layer, BatchedLayer) else [layer])]

    state = states.nbytes([*group.prefilled.states.values()])
    accounts_by_layer = [counted(layer) for layer in layers]
    all_indices = [torch.arange(lengths.candidates).expand(full_layer.keys.shape[1], -1)] * len(layers)
    for number, fork in enumerate(forks):
        counts = [layer[0 if is_full else number] for layer in accounts_by_layer]
        fill_stored(fork.result, fork.cell, lengths, fork.index or all_indices, counts, full_layer.slot_nbytes, state)


@torch.no_grad()
def read_answers(session: Session, group: PrefillGroup, cells: Sequence[CellSpec]) -> None:
    """Decode the full cache's answer once per protocol, and replace the scores that need this answer (`needs.answer`).

    An error ends only the cells with such scores. Fills `answer_steps` and adds to `score_seconds` of the prefill.
    cells: all cells that share the prefill.
    """
    prefilled = group.prefilled
    for protocol, members in _cells_with_answer(cells, prefilled).items():
        start, answer, failure = group.meter.now(), AnswerAttention(prefilled.length), None
        deadline = None if group.timeout_s is None else time.monotonic() + group.timeout_s
        session.answer = answer
        try:
            with borrow(prefilled, protocol) as cache:
                decoded = decode(group, cache, 1, protocol, deadline)[0]
            if decoded.error is not None:
                raise decoded.error
        except Exception as error:  # noqa: BLE001 - the status of the cells that wanted the answer, not of the others
            failure = error.with_traceback(None)
        finally:
            session.answer = None
        prefilled.answer_steps[protocol] = answer.steps
        seconds = group.meter.now() - start
        for key, cell in members.items():
            prefilled.score_seconds[key] += seconds
            if failure is not None:
                prefilled.failures[key] = failure
            else:
                _rescore(prefilled, key, cell, answer)


def _cells_with_answer(cells: Sequence[CellSpec], prefilled: Prefilled) -> dict[str, dict[Key, CellSpec]]:
    """Map each protocol to {score key: one cell with this score}, for computed scores that need the full cache's answer."""
    cells_by_protocol: dict[str, dict[Key, CellSpec]] = {}
    for cell in cells:
        with contextlib.suppress(Exception):  # a faulty part comes again when its cell is planned
            lengths = prefilled.lengths[cell.protocol]
            if not cell.evicts(lengths.reduced) or not cell.compressor.needs.answer:
                continue
            key = score_key(cell, lengths)
            if key in prefilled.scores and key not in prefilled.failures:
                cells_by_protocol.setdefault(cell.protocol, {}).setdefault(key, cell)
    return cells_by_protocol


def _rescore(prefilled: Prefilled, key: Key, cell: CellSpec, answer: AnswerAttention) -> None:
    clock = devices.at(prefilled.logits.device).now
    start = clock()
    try:
        finished = cell.compressor.eviction.scorer.with_answer
        scores = prefilled.scores[key]
        prefilled.scores[key] = [finished(score, answer.mass(layer)) for layer, score in enumerate(scores)]
    except Exception as error:  # noqa: BLE001 - the method's own fault
        prefilled.failures[key] = error.with_traceback(None)
    prefilled.score_seconds[key] += clock() - start

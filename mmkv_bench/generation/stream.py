"""protocol=stream: prefill a video, pictures or a text chunk by chunk with a limited cache, then answer the question.

No KV head stores more entries than the budget and one chunk. Each (method, budget) setting prefills separately, because evicted
entries change the hidden states of later tokens, but only once for all questions about a document and for all points (`ask_at`)
at which a question is asked.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.entry_counts import account
from mmkv_bench.compression.positions import last_positions
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamListener, check_streams
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.families.registry import check_no_states
from mmkv_bench.generation.decode import decode
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.forks import borrow
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import Prefilled, PrefillGroup, slack
from mmkv_bench.generation.result import (
    CellSpec,
    ForkResult,
    blank,
    describe,
    fill_answer,
    fill_asked,
    fill_stored,
    status_of,
)
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.stream_reader import Reader
from mmkv_bench.generation.stream_reading import Held, Stop, copied, read
from mmkv_bench.protocols import protocol


def run_streams(
    session: Session,
    family: ModelFacts,
    rules: DecodeRules,
    tokenizer: Any,
    prompt: EncodedPrompt,
    cells: Sequence[CellSpec],
    timeout_s: float | None = None,
    measured: str = "group",
    held: dict[Hashable, Held] | None = None,
) -> list[ForkResult]:
    """Answer one prompt under protocol=stream; return one result per cell, in the order of `cells`.

    An error becomes a result's status. Cells that differ only in `ask_at` share one prefill of the context.

    Args:
        session: an open session of the model.
        measured: value of the column `measured`; `own` under `sharing=off`.
        held: cell settings -> the last prefilled context, for further questions about the same document; None: prefill for every
            question.
    """
    groups: dict[Any, list[CellSpec]] = {}
    for cell in cells:
        key = cell.compressor, cell.budget, cell.seed, replace(cell.stream, ask_at=1.0)
        groups.setdefault(key, []).append(cell)
    results: dict[str, ForkResult] = {}
    for key, group in groups.items():
        meter = Meter(next(session.model.parameters()).device)
        asking = _Asking(session, family, rules, tokenizer, prompt, timeout_s, meter)
        result_by_cell = {
            cell.cell: blank(cell, prompt, measured=measured, fork_batch=1, fork_rows=1) for cell in group
        }
        asking.group(key, group, result_by_cell, {} if held is None else held)
        results |= result_by_cell
    return [results[cell.cell] for cell in cells]


@dataclass
class _Asking:
    """Model, settings and prompt, for the cells that share one prefill of the context."""

    session: Session
    family: ModelFacts
    rules: DecodeRules
    tokenizer: Any
    whole: EncodedPrompt
    timeout_s: float | None
    meter: Meter

    def group(
        self, key: Hashable, cells: Sequence[CellSpec], results: dict[str, ForkResult], held: dict[Hashable, Held]
    ) -> None:
        readers: dict[str, Reader] = {}
        for cell in cells:
            try:
                check_streams(cell.compressor, cell.budget)
                check_no_states(self.family.rules, bool(self.family.states.layers))
                readers[cell.cell] = Reader(self.session.model, self.family, self.whole, cell)
            except Exception as error:  # noqa: BLE001 - becomes the cell's status; other cells go on
                self._fail(results[cell.cell], error)
        document = None if self.whole.document is None else self.whole.document.identity
        stop_lengths, stream = {one.length for one in readers.values()}, held.pop(key, None)
        is_reused = stream is not None and document == stream.document and stop_lengths <= set(stream.stops)
        if stream is None or not is_reused:
            stream = Held(document, {})
            if readers:
                longest = max(cells, key=lambda cell: readers[cell.cell].length if cell.cell in readers else 0)
                self._read(longest, readers[longest.cell], stop_lengths, stream)
        for cell in cells:
            if cell.cell in readers:
                result, stop = results[cell.cell], stream.stops[readers[cell.cell].length]
                result.compression_reused = None if document is None else is_reused
                try:
                    if isinstance(stop, Exception):
                        raise stop
                    self._answer(cell, readers[cell.cell], stop, 0.0 if is_reused else stop.seconds["prefill"], result)
                except Exception as error:  # noqa: BLE001 - as above
                    self._fail(result, error)
                result.peak_device_bytes, result.peak_resident_bytes = (
                    self.meter.peak_device(),
                    self.meter.peak_resident(),
                )
        if document is not None and not any(isinstance(stop, Exception) for stop in stream.stops.values()):
            held[key] = stream

    def _fail(self, result: ForkResult, error: Exception) -> None:
        result.status, result.error = status_of(error), describe(error)
        devices.at(next(self.session.model.parameters()).device).release()

    def _read(self, cell: CellSpec, reader: Reader, ends: set[int], stream: Held) -> None:
        """Prefill the context once; for each of `ends` (numbers of tokens), add the state there, or an error, to `stream`."""
        prompt, document, last = reader.prompt, self.whole.document, reader.length
        question = self.whole.length - lengths_of(protocol(cell.protocol), self.whole, self.family).reduced
        question += 0 if document is None else max(0, document.longest - self.whole.length)
        question += reader.media is not None  # an early question is preceded by the token that closes a frame
        reserve_slots = reader.asked + max(
            *(clip.end - clip.start for clip in reader.clips), slack(self.rules.max_new_tokens, question)
        )
        cap = None if cell.budget is None else cell.entries(reader.length)
        listener = StreamListener(
            cell.compressor, cap, cell.seed, reader.frames, reserve_slots, reader.asked, self.meter.phase
        )

        def keep(end: int, cache: CompressedCache, logits: Tensor) -> None:
            if end in ends:
                kept_cache = cache if end == last else copied(cache)
                max_stored = max(layer.stored for layer in cache.compressed)  # counts layers that have not evicted yet
                counts = {
                    "entries_max": max(listener.entries_max, max_stored),
                    "entries_peak": max(listener.entries_peak, max_stored),
                    "eviction_rounds": listener.rounds,
                    "entries_evicted": listener.evicted,
                }
                stream.stops[end] = Stop(
                    kept_cache, logits, counts, tuple(listener.fallbacks), dict(self.meter.seconds)
                )

        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        identity = prompt.identity if document is None else document.identity
        try:
            read(self.session, reader, listener, self.meter, deadline, identity, keep)
        except Exception as error:  # noqa: BLE001 - becomes the status of cells that ask later
            for end in ends - set(stream.stops):
                stream.stops[end] = error.with_traceback(None)

    def _answer(self, cell: CellSpec, reader: Reader, stop: Stop, spent: float, result: ForkResult) -> None:
        """Answer a cell's question from the state `stop`, and fill `result`. spent: seconds of `timeout_s` already used."""
        session, prompt, meter, cache = self.session, reader.prompt, self.meter, stop.cache
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s - spent
        lengths = reader.lengths
        result.prompt_tokens, result.context_tokens = prompt.length, lengths.reduced
        result.visual_tokens, result.question_text_before_cut = prompt.visual_tokens, prompt.question_text_before_cut
        result.ask_at = cell.stream.ask_at
        result.question_known = None if self.whole.document is None else "none"
        heads = cache.layers[0].keys.shape[1] * len(cache.layers)
        fill_asked(result, cell, lengths, heads, prompt.types[0])
        result.fallback = list(dict.fromkeys([*result.fallback, *stop.fallbacks]))
        index = [layer.slot_positions()[0] for layer in cache.layers]
        layer_counts = [account(layer, lengths.fed) for layer in cache.layers]
        fill_stored(result, cell, lengths, index, layer_counts, cache.layers[0].slot_nbytes)
        for name, count in stop.counts.items():
            setattr(result, name, count)
        result.frames_left = reader.frames_left(cache)
        prefilled = Prefilled(
            prompt=prompt.context(lengths.reduced),
            lengths={cell.protocol: lengths},
            cache=cache,
            states={},
            logits=stop.logits,
            last_positions=last_positions(
                reader.positions[..., : lengths.reduced], lengths.reduced, stop.logits.device
            ),
            scalings=[module.scaling for module in session.attentions],
            scores={},
            summaries={},
            fallbacks={},
            failures={},
            score_seconds={},
        )
        group = PrefillGroup(
            session.model,
            prompt,
            prefilled,
            self.rules,
            self.tokenizer,
            meter,
            self.rules.max_new_tokens,
            self.timeout_s,
        )
        start = meter.now()
        with borrow(prefilled, cell.protocol):
            (answer,) = decode(group, cache, 1, cell.protocol, deadline)
            result.entries_end = sum(int(layer.entries().sum()) for layer in cache.layers)
        result.decode_s = meter.now() - start
        if answer.error is not None:
            raise answer.error
        text = self.rules.text(answer.tokens, answer.finish, self.tokenizer)
        fill_answer(result, cell, lengths, answer.tokens, answer.finish, text)
        result.vision_s, result.compress_s = stop.seconds.get("vision"), stop.seconds.get("compress", 0.0)
        result.prefill_s = max(stop.seconds["prefill"] - result.compress_s, 0.0)
        result.tpot_s = result.decode_s / result.n_tokens

"""Prefill once, fork many: every cell of a run answers a sample from one shared prefill.

The prefilled cache is read-only. `full` (and every cell whose prompt fits its budget) decodes from the cache itself
and appends to its slack; the other cells gather their entries into batches that decode together. A fork that fails,
runs out of memory or time, or meets NaN ends alone: its batch is halved until the culprit stands by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.session import Session
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.answers import read_answers
from mmkv_bench.generation.decode import Decoded, decode
from mmkv_bench.generation.encode import EncodedPrompt, check_refeed, context_cut
from mmkv_bench.generation.forks import Fork, audit, batches, borrow, gather, plan
from mmkv_bench.generation.measure import Meter
from mmkv_bench.generation.measuring import NOTHING, Extras, Measuring
from mmkv_bench.generation.prefill import Prefilled, prefill
from mmkv_bench.generation.result import CellSpec, ForkResult, GenerationTimeout, describe, status_of
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.models.families import Family

log = logging.getLogger(__name__)


class Engine:
    """Answers prompts with all cells of a run; a context manager that keeps one session open on the model.

    Args:
        model: a supported model in eval mode. family: its facts. rules: how to decode. tokenizer: decodes answers.
        fork_batch: most forks decoded together; fork_memory: most bytes of gathered entries at a time (None: no cap).
        timeout_s: limit for one fork's scoring or decoding, and for each of its measures (None: no limit).
        attention: `sdpa` or `eager`; the model's own when None.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        rules: DecodeRules,
        tokenizer,
        *,
        fork_batch: int = 32,
        fork_memory: int | None = None,
        timeout_s: float | None = None,
        attention: str | None = None,
    ):
        self.model, self.family, self.rules, self.tokenizer = model, family, rules, tokenizer
        self.fork_batch, self.fork_memory, self.timeout_s = fork_batch, fork_memory, timeout_s
        self.session = Session(model, None, attention=attention)
        self.device = next(model.parameters()).device

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.session.__exit__(*exception)

    def answer(self, prompt: EncodedPrompt, cells: Sequence[CellSpec], extras: Extras = NOTHING) -> list[ForkResult]:
        """One result per cell, in the order of `cells`; never raises for what goes wrong inside one of them.

        extras: what to measure besides the answers, which are the same whatever it is.
        """
        results = {cell.cell: self._blank(cell, prompt) for cell in cells}
        shared = [cell for cell in cells if cell.protocol != "query_agnostic"]
        strict = [cell for cell in shared if cell.protocol == "strict"]
        if strict:
            try:
                check_refeed(prompt)
            except UnsupportedError as error:
                self._fail(strict, results, error)
                shared = [cell for cell in shared if cell.protocol != "strict"]
        context = [cell for cell in cells if cell.protocol == "query_agnostic"]
        if shared:
            self._group(prompt, prompt, shared, results, extras)
        if context:
            try:
                cut = context_cut(prompt, self.family)
            except UnsupportedError as error:
                self._fail(context, results, error)
            else:
                for cell in context:
                    results[cell.cell].context_tokens = cut
                    results[cell.cell].question_text_before_cut = prompt.question_text_before_cut
                self._group(prompt, prompt.context(cut), context, results, extras)
        return [results[cell.cell] for cell in cells]

    # ------------------------------------------------------------------ one prefill
    def _blank(self, cell: CellSpec, prompt: EncodedPrompt) -> ForkResult:
        return ForkResult(
            cell.cell,
            prompt_tokens=prompt.length,
            context_tokens=prompt.length,
            visual_tokens=prompt.visual_tokens,
            encode_s=prompt.encode_s,
            fork_batch=self.fork_batch,
        )

    @staticmethod
    def _fail(cells: Sequence[CellSpec], results: dict[str, ForkResult], error: Exception) -> None:
        for cell in cells:
            results[cell.cell].status, results[cell.cell].error = status_of(error), describe(error)

    def _group(
        self,
        prompt: EncodedPrompt,
        prefix: EncodedPrompt,
        cells: Sequence[CellSpec],
        results: dict[str, ForkResult],
        extras: Extras,
    ) -> None:
        """All cells that share the prefill of `prefix` (the whole prompt, or its context)."""
        meter = Meter(self.device)
        question = prompt.length - prefix.length
        reserve = max(self.rules.max_new_tokens, len(extras.reference)) + question + 1
        prefilled = None
        try:
            prefilled = prefill(self.session, prefix, cells, meter, reserve)
        except Exception as error:  # noqa: BLE001 - whatever stopped the prefill is every cell's status
            self._fail(cells, results, error)
        if prefilled is None:
            self._release()
            return
        read_answers(self.session, prefilled, prompt, cells, self.rules, meter, self.timeout_s)
        forks, whole = [], []
        heads, layers = prefilled.cache.layers[0].keys.shape[1], len(prefilled.cache.layers)
        for cell in cells:
            result = results[cell.cell]
            try:
                self._describe(result, cell, prefilled, heads * layers, question)
                fork = plan(prefilled, cell, result)
                if self.timeout_s is not None and fork.compress_s > self.timeout_s:
                    raise GenerationTimeout(f"scoring took {fork.compress_s:.1f} s, more than timeout_s")
            except Exception as error:  # noqa: BLE001 - a method's fault ends its own cell only
                self._fail([cell], results, error)
                continue
            (whole if fork.index is None else forks).append(fork)
        for done_with in (prefilled.orders, prefilled.failures):  # raised errors refer to the prefill
            done_with.clear()
        if not any(fork.cell.compressor.decoding for fork in forks):  # policies may start from the scores
            prefilled.scores.clear()
        measuring = Measuring(
            self.model, prefilled, prompt, self.rules, self.tokenizer, extras, reserve, meter, self.timeout_s
        )
        for protocol in sorted({fork.cell.protocol for fork in [*whole, *forks]}):
            same = [fork for fork in whole if fork.cell.protocol == protocol]
            if same:
                self._decode(same, prefilled, prompt, reserve, meter, measuring)
            measuring.full(protocol, same, any(fork.cell.protocol == protocol for fork in forks))
        for batch in batches(forks, prefilled, reserve, self.fork_batch, self.fork_memory):
            self._decode(batch, prefilled, prompt, reserve, meter, measuring)
        for cell in cells:
            results[cell.cell].peak_device_bytes = meter.peak_device()
            results[cell.cell].peak_resident_bytes = meter.peak_resident()
            results[cell.cell].fork_group = f"{prefix.identity}/{prefix.length}"

    def _describe(self, result: ForkResult, cell: CellSpec, prefilled: Prefilled, heads: int, question: int) -> None:
        entries = cell.entries(prefilled.length)
        compressor = cell.compressor
        result.budget_entries = None if compressor.unbudgeted else entries
        result.entries_asked = None if compressor.unbudgeted else min(entries, prefilled.length) * heads
        result.entries_appended = question * heads
        result.vision_s, result.prefill_s = prefilled.seconds.get("vision"), prefilled.seconds["prefill"]
        result.fallback = list(compressor.fallbacks(entries, prefilled.length, prefilled.prompt.types[0]))
        if cell.evicts(prefilled.length):
            result.window_effective = compressor.scorer.window_effective(entries, prefilled.length)

    # ------------------------------------------------------------------ decoding
    def _decode(
        self,
        forks: list[Fork],
        prefilled: Prefilled,
        prompt: EncodedPrompt,
        reserve: int,
        meter: Meter,
        measuring: Measuring,
    ) -> None:
        """Decode a batch; on any fault halve it until what fails stands alone."""
        start, aside, failure = meter.now(), meter.aside_s, None
        try:
            decoded = self._attempt(forks, prefilled, prompt, reserve, measuring)
        except Exception as error:  # noqa: BLE001 - becomes the status of the fork that causes it
            failure = status_of(error), describe(error)
        if failure is not None:  # not in the handler, whose traceback keeps the failed batch's cache alive
            self._release()
            if len(forks) == 1 or forks[0].index is None:
                for fork in forks:
                    fork.result.status, fork.result.error = failure
                return
            log.info("a batch of %d forks failed (%s); halving it", len(forks), failure[1])
            middle = len(forks) // 2
            self._decode(forks[:middle], prefilled, prompt, reserve, meter, measuring)
            self._decode(forks[middle:], prefilled, prompt, reserve, meter, measuring)
            return
        seconds = meter.now() - start - (meter.aside_s - aside)
        for fork, answer in zip(forks, decoded, strict=True):
            self._finish(fork, answer, prefilled, seconds, 1 if fork.index is None else len(forks))

    def _attempt(
        self, forks: list[Fork], prefilled: Prefilled, prompt: EncodedPrompt, reserve: int, measuring: Measuring
    ) -> list[Decoded]:
        protocol, whole = forks[0].cell.protocol, forks[0].index is None
        acting = not whole and forks[0].cell.compressor.decoding is not None

        def gathered() -> CompressedCache:
            return gather(prefilled, forks, reserve, prompt.length)

        if acting:  # its policies change what they are given: measured on entries of its own
            measuring.forks(forks, None, gathered)
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        # cells that keep everything are one and the same fork
        held = borrow(prefilled, protocol == "strict") if whole else contextlib.nullcontext(gathered())
        with held as cache:
            if deadline is not None and time.monotonic() > deadline:
                raise GenerationTimeout("gathering the kept entries ran past timeout_s")
            audit(forks, cache.layers, prefilled)
            if not whole and not acting:
                start = time.monotonic()
                measuring.forks(forks, cache, gathered)
                deadline = None if deadline is None else deadline + time.monotonic() - start
            rows = 1 if whole else len(forks)
            decoded = decode(
                self.model, cache, rows, prefilled, self.rules, protocol, prompt.input_ids, deadline, acting
            )
        return decoded * len(forks) if whole else decoded

    def _finish(self, fork: Fork, answer: Decoded, prefilled: Prefilled, seconds: float, rows: int) -> None:
        result = fork.result
        heads = prefilled.cache.layers[0].keys.shape[1] * len(prefilled.cache.layers)
        result.fork_rows, result.compress_s, result.decode_s = rows, fork.compress_s, seconds
        if answer.error is not None:
            result.status, result.error = status_of(answer.error), describe(answer.error)
            return
        result.token_ids, result.n_tokens = list(answer.tokens), len(answer.tokens)
        result.finish_reason = answer.finish
        result.answer = self.rules.text(answer.tokens, answer.finish, self.tokenizer)
        first = 1 if fork.cell.protocol == "paper" else 0
        from_full = result.n_tokens if fork.index is None else fork.cell.tokens_from_full
        result.tokens_from_compressed = max(result.n_tokens - from_full, 0)
        result.entries_end = answer.entries
        if answer.entries is None:
            result.entries_end = result.entries_resident + result.entries_appended + (result.n_tokens - 1) * heads
        steps = max(result.n_tokens - first, 0)
        result.tpot_s = seconds / steps if steps else None

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def as_row(result: ForkResult) -> dict:
    """The result as the columns of a response row."""
    return dataclasses.asdict(result)

"""Prefill a prompt once, and answer it from the shared prefill with every cell of a run.

A cell is one (method, budget, protocol, seed) setting. A fork is the cache from which a cell decodes after the prefill. `full`,
and every cell whose budget holds the whole prompt, decodes from the full cache and appends to the cache's spare slots. The kept
entries of other cells are copied into batches. If a batch fails, it is halved until the failing fork is alone.

Several questions about one document may be answered in one batch, with one row per question and cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Self, TypeAlias

from torch import nn

from mmkv_bench import devices
from mmkv_bench.compression.flash import check as check_flash
from mmkv_bench.compression.second_prefill import prefill_kept_entries
from mmkv_bench.compression.session import Session
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.generation.decode import EAGER_DECODE, CompiledStep, Decoded, Lead, decode, follow, lead
from mmkv_bench.generation.encode import DocumentPrompts, EncodedPrompt, lengths_of
from mmkv_bench.generation.fidelity import NOTHING, ExtraMeasures, ForkMeasures
from mmkv_bench.generation.forks import Fork, audit, batches, borrow, check_time, gather, plan, read_answers
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import Prefilled, PrefillGroup, merge_scores, prefill, prefill_together, slack
from mmkv_bench.generation.result import (
    CellSpec,
    ForkResult,
    GenerationTimeout,
    blank,
    describe,
    fill_answer,
    fill_asked,
    status_of,
)
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.stream import Held, run_streams
from mmkv_bench.generation.turns import Conversation, Parts, run_turns
from mmkv_bench.protocols import Lengths, Protocol, protocol

log = logging.getLogger(__name__)

Results: TypeAlias = dict[str, ForkResult]
"""Results of one question: cell -> result."""


class Engine:
    """Context manager that answers prompts with all cells of a run, in one session on the model.

    Args:
        model: a supported model in eval mode.
        fork_batch: largest number of forks in a batch.
        fork_memory: largest number of bytes of a batch's kept entries; None: no limit.
        timeout_s: limit in seconds for scoring a fork, for decoding a batch, and for each measure; None: no limit.
        attention: `sdpa`, `eager` or `flash_attention_2` (which cannot be compiled); None: the model's setting.
        step: compiled decode step; None: the model decodes. Cells with a decode policy never use the compiled step.
    """

    def __init__(
        self,
        model: nn.Module,
        family: ModelFacts,
        rules: DecodeRules,
        tokenizer,
        *,
        fork_batch: int = 32,
        fork_memory: int | None = None,
        timeout_s: float | None = None,
        attention: str | None = None,
        step: CompiledStep | None = None,
    ):
        self.step = step
        self.model, self.family, self.rules, self.tokenizer = model, family, rules, tokenizer
        self.fork_batch, self.fork_memory, self.timeout_s = fork_batch, fork_memory, timeout_s
        self.session = Session(model, None, attention=attention, packs=step is None)
        weight = next(model.parameters())
        self.device = weight.device
        self._compressed: dict[str, tuple[Hashable, Prefilled]] = {}  # protocol -> (key, prefill) of its last document
        self._streams: dict[Hashable, Held] = {}
        self._conversations: dict[str, Conversation] = {}  # cell -> its latest conversation
        # results of the last document's questions that have not been asked yet
        self._answered: dict[tuple[Hashable, ...], Results] = {}
        check_flash(self.session.base, weight.device, weight.dtype, step is not None)
        if step is not None and self.session.has_states:
            raise UnsupportedError(
                f"{type(model).__name__} has layers that keep a state, which a compiled step cannot read; use "
                "decode=eager"
            )

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._compressed.clear()
        self._streams.clear()
        self._conversations.clear()
        self._answered.clear()
        self.session.__exit__(*exception)

    def answer(
        self, prompt: EncodedPrompt, cells: Sequence[CellSpec], extras: ExtraMeasures = NOTHING
    ) -> list[ForkResult]:
        """Answer a prompt with every cell; return one result per cell, in the order of `cells`.

        An error becomes the status of the results it affects and is not raised. Waiting questions about the prompt's document may
        be answered too; a later call returns those results.

        extras: measures to take besides the answers. They do not change the answers.
        """
        results = {cell.cell: self._blank(cell, prompt) for cell in cells}
        all_cells, cells = cells, [cell for cell in cells if not protocol(cell.protocol).apart]
        engine_parts = self.session, self.family, self.rules, self.tokenizer
        streams = [cell for cell in all_cells if protocol(cell.protocol).streams]
        for result in run_streams(*engine_parts, prompt, streams, self.timeout_s, held=self._streams):
            results[result.cell] = result
        for cell in all_cells:
            if protocol(cell.protocol).converses:
                results[cell.cell] = run_turns(Parts(*engine_parts, self.timeout_s), self._conversations, prompt, cell)
        lengths: dict[str, Lengths] = {}
        for name in dict.fromkeys(cell.protocol for cell in cells):
            protocol_rules, cells_of_protocol = protocol(name), [cell for cell in cells if cell.protocol == name]
            try:
                lengths[name] = lengths_of(protocol_rules, prompt, self.family)
            except UnsupportedError as error:
                self._fail(cells_of_protocol, results, error)
                continue
            for cell in cells_of_protocol:
                _fill_cut(results[cell.cell], cell, prompt, lengths[name])
        document_cells = {
            cell.cell
            for cell in cells
            if cell.protocol in lengths and prompt.document is not None and cell.serves_all_questions
        }
        for name in dict.fromkeys(cell.protocol for cell in cells if cell.cell in document_cells):
            cells_of_protocol = [cell for cell in cells if cell.cell in document_cells and cell.protocol == name]
            self._answer_document(prompt, lengths[name], cells_of_protocol, results, extras)
        cells_left = [cell for cell in cells if cell.cell not in document_cells]
        for end in sorted({self._prefill_key(one) for one in lengths.values()}, reverse=True):
            shared = {name: one for name, one in lengths.items() if self._prefill_key(one) == end}
            cells_of_protocol = [cell for cell in cells_left if cell.protocol in shared]
            if cells_of_protocol:
                self._answer_from_one_prefill(prompt, shared, cells_of_protocol, results, extras)
        return [results[cell.cell] for cell in all_cells]

    def _blank(self, cell: CellSpec, prompt: EncodedPrompt) -> ForkResult:
        return blank(cell, prompt, fork_batch=self.fork_batch)

    def _prefill_key(self, lengths: Lengths) -> tuple[int, int]:
        """Return a key; protocols with equal keys share a prefill.

        The key is the number of tokens to prefill, and the number of tokens after which recurrent states are saved (0: never).
        """
        return lengths.prefilled, lengths.candidates if self.session.has_states else 0

    # ------------------------------------------------------------------ one document
    def _answer_document(
        self,
        prompt: EncodedPrompt,
        lengths: Lengths,
        cells: Sequence[CellSpec],
        results: Results,
        extras: ExtraMeasures,
    ) -> None:
        """Answer the prompt with all cells of one protocol that compresses a document once for all questions; fill `results`."""
        document, protocol_rules = prompt.document, protocol(cells[0].protocol)
        assert document is not None, "a prompt with its document"
        names = tuple(cell.cell for cell in cells)
        stored_results = self._answered.pop(
            (protocol_rules.name, document.identity, document.number, names, extras), None
        )
        if stored_results is not None:
            results.update(stored_results)
            return
        sources = document.scoring(protocol_rules, lengths.reduced)
        longest = max(self.rules.max_new_tokens, len(extras.reference))
        reserve = slack(longest, max(document.longest - sources[0].length, 0))
        meter = Meter(self.device)
        key = (tuple(source.identity for source in sources), reserve, names)
        is_reused = protocol_rules.name in self._compressed and self._compressed[protocol_rules.name][0] == key
        if not is_reused:
            self._compressed.pop(protocol_rules.name, None)
            self._answered = {
                key_of_results: stored
                for key_of_results, stored in self._answered.items()
                if key_of_results[0] != protocol_rules.name
            }
            try:
                question_lengths = dataclasses.replace(lengths, prefilled=sources[0].length)
                self._compressed[protocol_rules.name] = (
                    key,
                    self._prefill_sources(sources, cells, question_lengths, meter, reserve),
                )
            except Exception as error:  # noqa: BLE001 - whatever stopped the prefill is every cell's status
                self._fail(cells, results, error)
        if protocol_rules.name not in self._compressed:
            self._release()
            return
        questions_decoded_here: list[tuple[PrefillGroup, Results]] = []
        results_ahead: dict[tuple[Hashable, ...], Results] = {}
        for number in (document.number, *self._questions_in_batch(document, protocol_rules, extras, len(cells))):
            question, question_results = prompt, results
            if number != document.number:
                question = document.questions[number]
                question_results = {cell.cell: self._blank(cell, question) for cell in cells}
                results_ahead[protocol_rules.name, document.identity, number, names, extras] = question_results
            question_lengths = dataclasses.replace(lengths, prompt=question.length, prefilled=sources[0].length)
            for cell in cells:
                result = question_results[cell.cell]
                _fill_cut(result, cell, question, question_lengths)
                result.question_known = document.known(protocol_rules)
                result.compression_reused = is_reused or question is not prompt
            prefilled = dataclasses.replace(
                self._compressed[protocol_rules.name][1], lengths={protocol_rules.name: question_lengths}
            )
            questions_decoded_here.append((self._prefill_group(question, prefilled, meter, longest), question_results))
        self._forks(questions_decoded_here, cells, extras)
        self._answered.update(results_ahead)

    def _questions_in_batch(
        self, document: DocumentPrompts, rule: Protocol, extras: ExtraMeasures, cells: int
    ) -> tuple[int, ...]:
        """Return the numbers of the waiting questions that are answered in a batch with the current question.

        All these questions, with `cells` rows each, fill one batch. The result is empty if each question has its own compression
        or reference answer. It is also empty if layers keep a window or a recurrent state, because all rows of such layers must
        have been fed equally many tokens.
        """
        answers_separately = rule.knows == "paraphrase" or bool(extras.reference) or self.session.has_states
        return () if answers_separately else document.waiting[: -(-self.fork_batch // cells) - 1]

    def _prefill_sources(
        self,
        sources: Sequence[EncodedPrompt],
        cells: Sequence[CellSpec],
        lengths: Lengths,
        meter: Meter,
        reserve: int,
    ) -> Prefilled:
        """Prefill `sources`, which begin with the same context; return the first prefill, with scores averaged over all."""
        name = cells[0].protocol
        lengths_of_sources = [{name: dataclasses.replace(lengths, prefilled=source.length)} for source in sources]
        if len(sources) == 1:
            prefilled = prefill(self.session, sources[0], cells, lengths_of_sources[0], meter, reserve)
        else:
            prefilled_sources = prefill_together(self.session, sources, cells, lengths_of_sources, meter, reserve)
            merge_scores(prefilled_sources, cells, name)
            prefilled = prefilled_sources[0]
        return dataclasses.replace(prefilled, shared=True, lengths={name: lengths})

    # ------------------------------------------------------------------ one prefill
    @staticmethod
    def _fail(cells: Sequence[CellSpec], results: Results, error: Exception) -> None:
        for cell in cells:
            results[cell.cell].status, results[cell.cell].error = status_of(error), describe(error)

    def _answer_from_one_prefill(
        self,
        prompt: EncodedPrompt,
        lengths: Mapping[str, Lengths],
        cells: Sequence[CellSpec],
        results: Results,
        extras: ExtraMeasures,
    ) -> None:
        """Answer a prompt with all cells from one prefill; fill `results`. lengths: protocol -> the prompt's lengths."""
        meter, end = Meter(self.device), next(iter(lengths.values())).prefilled
        prefix = prompt if end == prompt.length else prompt.context(end)
        longest = max(self.rules.max_new_tokens, len(extras.reference))
        prefilled = None
        try:
            prefilled = prefill(self.session, prefix, cells, lengths, meter, slack(longest, prompt.length - end))
        except Exception as error:  # noqa: BLE001 - whatever stopped the prefill is every cell's status
            self._fail(cells, results, error)
        if prefilled is None:
            self._release()
            return
        self._forks([(self._prefill_group(prompt, prefilled, meter, longest), results)], cells, extras)

    def _prefill_group(self, prompt: EncodedPrompt, prefilled: Prefilled, meter: Meter, longest: int) -> PrefillGroup:
        return PrefillGroup(self.model, prompt, prefilled, self.rules, self.tokenizer, meter, longest, self.timeout_s)

    def _forks(
        self, asked: Sequence[tuple[PrefillGroup, Results]], cells: Sequence[CellSpec], extras: ExtraMeasures
    ) -> None:
        """Answer one question, or several about one document, with all cells; fill the results.

        asked: prefill and results of each question.
        """
        forks: list[Fork] = []
        measuring: dict[PrefillGroup, ForkMeasures] = {}
        for group, results in asked:
            read_answers(self.session, group, cells)
            evicting, full_forks = self._plan_forks(group, cells, results)
            measures = measuring[group] = ForkMeasures(group, extras)
            for name in sorted({fork.cell.protocol for fork in [*full_forks, *evicting]}):
                full_forks_of_protocol = [fork for fork in full_forks if fork.cell.protocol == name]
                if full_forks_of_protocol:
                    self._decode(full_forks_of_protocol, measuring)
                measures.full(name, full_forks_of_protocol, any(fork.cell.protocol == name for fork in evicting))
            forks += evicting
        for batch in batches(forks, self.fork_batch, self.fork_memory):
            self._decode(batch, measuring)
        for group, results in asked:
            for cell in cells:
                results[cell.cell].peak_device_bytes = group.meter.peak_device()
                results[cell.cell].peak_resident_bytes = group.meter.peak_resident()
                results[cell.cell].fork_group = f"{group.prefilled.prompt.identity}/{group.prefilled.length}"

    def _plan_forks(
        self, group: PrefillGroup, cells: Sequence[CellSpec], results: Results
    ) -> tuple[list[Fork], list[Fork]]:
        """Return the forks with copied entries, and the forks that borrow the full cache."""
        forks: list[Fork] = []
        full_forks: list[Fork] = []
        prefilled = group.prefilled
        for cell in cells:
            result = results[cell.cell]
            try:
                self.session.check_method(cell.compressor, protocol(cell.protocol))
                result.vision_s, result.prefill_s = prefilled.seconds.get("vision"), prefilled.seconds["prefill"]
                fill_asked(result, cell, prefilled.lengths[cell.protocol], group.heads, prefilled.prompt.types[0])
                fork = plan(prefilled, cell, result)
                fork.group = group
                if protocol(cell.protocol).prefills_again:
                    self._prefill_again(fork)
                check_time(fork, self.timeout_s)
            except Exception as error:  # noqa: BLE001 - a method's fault ends its own cell only
                self._fail([cell], results, error)
                continue
            (full_forks if fork.index is None else forks).append(fork)
        if prefilled.shared:  # the document's next question needs it
            return forks, full_forks
        for done_with in (prefilled.orders, prefilled.failures):  # raised errors refer to the prefill
            done_with.clear()
        if not any(fork.cell.compressor.decoding for fork in forks):  # policies may start from the scores
            prefilled.scores.clear()
        return forks, full_forks

    def _prefill_again(self, fork: Fork) -> None:
        """Replace a fork's entries by those of a second prefill, whose attention sees the kept entries only."""
        fork.cell.compressor.check_only_evicts(fork.cell.protocol)
        if fork.index is not None:
            group, kept = fork.group, [index[None] for index in fork.index]
            start = group.meter.now()
            again_prefilled = prefill_kept_entries(self.session, group.prefilled.prompt.inputs, kept)
            fork.again = [(key[0], value[0]) for key, value in again_prefilled]
            fork.compress_s += group.meter.now() - start

    # ------------------------------------------------------------------ decoding
    def _decode(self, forks: list[Fork], measuring: Mapping[PrefillGroup, ForkMeasures]) -> None:
        """Decode a batch of forks and fill the results; halve the batch after an error."""
        meter = forks[0].group.meter
        start, aside, failure = meter.now(), meter.aside_s, None
        decoded: list[Decoded] = []
        try:
            decoded = self._attempt(forks, measuring)
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
            self._decode(forks[:middle], measuring)
            self._decode(forks[middle:], measuring)
            return
        seconds = meter.now() - start - (meter.aside_s - aside)
        for fork, answer in zip(forks, decoded, strict=True):
            self._finish(fork, answer, seconds, 1 if fork.index is None else len(forks))

    def _attempt(self, forks: list[Fork], measuring: Mapping[PrefillGroup, ForkMeasures]) -> list[Decoded]:
        meter, is_full = forks[0].group.meter, forks[0].index is None
        acting = not is_full and forks[0].cell.compressor.decoding is not None
        step, start, aside = None if acting else self.step, time.monotonic(), meter.aside_s
        questions = [list(same) for _, same in itertools.groupby(forks, lambda fork: fork.group)]
        leads: list[Lead] = []

        def deadline() -> float | None:
            return None if self.timeout_s is None else start + self.timeout_s + meter.aside_s - aside

        for same in questions:
            group, name = same[0].group, same[0].cell.protocol
            gathered = partial(gather, group.prefilled, same, group.room(name) if acting else group.reserve(name))
            measures = measuring[group]
            if acting:  # policies change their entries, so measures get a separate copy
                measures.forks(same, None, gathered)
            # all cells that keep everything are one fork
            with borrow(group.prefilled, name) if is_full else contextlib.nullcontext(gathered()) as cache:
                limit = deadline()
                if limit is not None and time.monotonic() > limit:
                    raise GenerationTimeout("gathering the kept entries ran past timeout_s")
                audit(same, cache.compressed, group)
                if not is_full and not acting:
                    measures.forks(same, cache, gathered)
                rows = 1 if is_full else len(same)
                if len(questions) == 1:
                    decoded = decode(group, cache, rows, name, deadline(), acting, step=step)
                    return decoded * len(same) if is_full else decoded
                leads.append(lead(group, cache, rows, name, deadline()))
        return follow(leads, deadline(), step=step)

    def _finish(self, fork: Fork, answer: Decoded, seconds: float, rows: int) -> None:
        result = fork.result
        if self.step is not None and fork.index is not None and fork.cell.compressor.decoding is not None:
            result.fallback.append(EAGER_DECODE)
        result.fork_rows, result.compress_s, result.decode_s = rows, fork.compress_s, seconds
        if answer.error is not None:
            result.status, result.error = status_of(answer.error), describe(answer.error)
            return
        lengths = fork.group.prefilled.lengths[fork.cell.protocol]
        text = self.rules.text(answer.tokens, answer.finish, self.tokenizer)
        fill_answer(result, fork.cell, lengths, answer.tokens, answer.finish, text)
        appended = result.entries_appended + (result.n_tokens - 1) * fork.group.heads
        result.entries_end = result.entries_resident + appended if answer.entries is None else answer.entries
        steps = max(result.n_tokens - protocol(fork.cell.protocol).from_prefill, 0)
        result.tpot_s = seconds / steps if steps else None

    def _release(self) -> None:
        devices.at(self.device).release()


def _fill_cut(result: ForkResult, cell: CellSpec, prompt: EncodedPrompt, lengths: Lengths) -> None:
    result.context_tokens = lengths.reduced
    if protocol(cell.protocol).cuts:
        result.question_text_before_cut = prompt.question_text_before_cut


def as_row(result: ForkResult) -> dict:
    """Return a result as a mapping from columns of a response row to values."""
    return dataclasses.asdict(result)

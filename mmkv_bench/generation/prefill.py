"""Prefill a prompt once and score the full cache for all cells (each a method, budget, protocol and seed)."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressor import stack_scores
from mmkv_bench.compression.observation import Needs, Observation, PromptBatch
from mmkv_bench.compression.positions import last_positions, positions_after
from mmkv_bench.compression.replay import Replay, ReplayText
from mmkv_bench.compression.selectors.base import Selector
from mmkv_bench.compression.session import Session
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.meter import Meter, vision_clock
from mmkv_bench.generation.result import CellSpec, NonFiniteLogitsError
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.protocols import Lengths, protocol

log = logging.getLogger(__name__)

Key: TypeAlias = tuple[type, *tuple[Hashable, ...]]
"""A part's class and its effective parameters."""


def score_key(cell: CellSpec, lengths: Lengths) -> Key:
    """Return a key of the cell's score; cells with equal keys share one score per layer."""
    scorer = cell.compressor.eviction.scorer
    seed = cell.seed if scorer.stochastic else None
    key = (type(scorer), scorer.key(cell.entries(lengths.reduced), lengths.prefilled), seed)
    needs = scorer.needs  # fed tokens, and so the answer and the replay, differ
    return (*key, cell.protocol) if needs.answer or needs.replay else key


def summary_key(cell: CellSpec, lengths: Lengths) -> Key | None:
    """Return a key of the layer statistics (summary) that a cell's allocator needs; None if the allocator needs none.

    Cells with equal keys share one summary per layer.
    """
    allocator = cell.compressor.eviction.allocator
    key = allocator.summary_key(cell.entries(lengths.reduced), lengths.prefilled)
    return None if key is None else (type(allocator), key)


class Recording:
    """Listener of a shared prefill, which stores each layer's scores `[Hkv, prefilled]` and summaries for allocators.

    An error of a scorer or allocator is stored in `failures` under the key of the score or summary, and ends only cells with
    this key.
    """

    def __init__(self, cells: Sequence[CellSpec], lengths: Mapping[str, Lengths], now: Callable[[], float]):
        self.lengths, self.now = lengths, now
        self.scorers: dict[Key, CellSpec] = {}
        self.allocators: dict[Key, CellSpec] = {}
        self.needs = Needs()
        for cell in cells:
            cell_lengths = lengths[cell.protocol]
            if not cell.evicts(cell_lengths.reduced):
                continue
            with contextlib.suppress(Exception):  # raised again when the cell is planned, and becomes its status
                score, summary = score_key(cell, cell_lengths), summary_key(cell, cell_lengths)
                self.scorers.setdefault(score, cell)
                if summary is not None:
                    self.allocators.setdefault(summary, cell)
                self.needs = self.needs | cell.compressor.needs
        self.scores: dict[Key, list[Tensor]] = {key: [] for key in self.scorers}
        self.fallbacks: dict[Key, list[str]] = {key: [] for key in self.scorers}
        self.summaries: dict[Key, dict[int, Tensor]] = {key: {} for key in self.allocators}
        self.failures: dict[Key, Exception] = {}
        self.seconds: dict[Key, float] = dict.fromkeys([*self.scorers, *self.allocators], 0.0)

    def layer_done(self, prompt: PromptBatch, layer: int, observations: list[Observation]) -> None:
        observation = observations[0]
        for key, cell in self._without_failure(self.scorers):
            with self._isolate_errors(key, layer):
                entries = cell.entries(self.lengths[cell.protocol].reduced)
                self.scores[key].append(cell.compressor.score(observation, entries, cell.seed))
                self.fallbacks[key] += cell.compressor.observed_fallbacks(observation, entries, cell.seed)
        for key, cell in self._without_failure(self.allocators):
            with self._isolate_errors(key, layer):
                entries = cell.entries(self.lengths[cell.protocol].reduced)
                summary = cell.compressor.summary(observation, entries, cell.seed)
                assert summary is not None, "an allocator with a summary's key has the summary"
                self.summaries[key][layer] = summary

    def _without_failure(self, cells: dict[Key, CellSpec]) -> list[tuple[Key, CellSpec]]:
        return [(key, cell) for key, cell in cells.items() if key not in self.failures]

    @contextlib.contextmanager
    def _isolate_errors(self, key: Key, layer: int) -> Iterator[None]:
        """Add the `with` block's time to the key's seconds, and store the block's error as the key's failure."""
        start = self.now()
        try:
            yield
        except Exception as error:
            log.info("%s failed in layer %d", key[0].__name__, layer, exc_info=error)
            self.failures[key] = error.with_traceback(None)  # its frames would keep the layer's tensors alive
            self.scores.pop(key, None)
        self.seconds[key] += self.now() - start

    def replay(self, text: nn.Module, words: ReplayText, prompt: PromptBatch) -> None:
        """Feed the context again for scorers with `needs.replay`, and replace the scores that they computed.

        text: the text model. words: token ids fed before and after the context.
        """
        for key, cell in self._without_failure(self.scorers):
            scorer, lengths = cell.compressor.eviction.scorer, self.lengths[cell.protocol]
            if scorer.needs.replay:
                with self._isolate_errors(key, -1):
                    replay = Replay(text, words, prompt, protocol(cell.protocol), lengths)
                    self.scores[key] = scorer.from_replay(replay)
                    self.fallbacks[key] += replay.fallbacks
        prompt.received = None

    def prompt_done(self, prompt: PromptBatch) -> None:
        """Do nothing; entries are selected after the prefill."""

    def kept(self) -> list[Tensor]:
        return []


@dataclass
class Prefilled:
    """A prompt's full cache, with the scores and summaries of all cells.

    Attributes:
        prompt: the prefilled tokens: the whole prompt or its context.
        lengths: protocol -> lengths of the whole prompt, for all protocols that share this prefill.
        cache: batch 1; every compressed layer has the entries of all tokens of `prompt`, and spare slots for new tokens.
        states: layer -> state of a layer that is not compressed, before the tokens that are fed again.
        logits: float32 `[V]` of the last prefilled token.
        last_positions: position ids of the last prefilled token as the text model received them, `[3|4, 1, 1]` or `[1, 1]`.
        scalings: factor of the attention logits, per layer.
        fallbacks: score key -> fallbacks that the scorer reported.
        answer_steps: protocol -> number of tokens fed to decode `full`'s answer, if a scorer needs the answer.
        shared: whether further questions about the prompt's document will be answered from this prefill.
        selections: cell -> kept entries per layer, int64 `[Hkv, m]`, seconds and fallbacks; filled if `shared`.
    """

    prompt: EncodedPrompt
    lengths: Mapping[str, Lengths]
    cache: CompressedCache
    states: Mapping[int, Any]
    logits: Tensor
    last_positions: Tensor
    scalings: list[float]
    scores: dict[Key, list[Tensor]]
    summaries: dict[Key, dict[int, Tensor]]
    fallbacks: dict[Key, list[str]]
    failures: dict[Key, Exception]
    score_seconds: dict[Key, float]
    seconds: dict[str, float] = field(default_factory=dict)
    orders: dict[Hashable, Tensor] = field(default_factory=dict)
    answer_steps: dict[str, int] = field(default_factory=dict)
    shared: bool = False
    selections: dict[str, tuple[list[Tensor], float, list[str]]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.prompt.length

    def order(self, key: Key, selector: Selector, candidates: int) -> Tensor:
        """Return `selector.order` of a score's first `candidates` columns, for all layers; computed once for all budgets."""
        # If `order` is a static function, no parameter changes the order. As a method, it may use parameters.
        order = inspect.getattr_static(type(selector), "order")
        name = (key, type(selector).order, candidates, None if isinstance(order, staticmethod) else id(selector))
        if name not in self.orders:
            self.orders[name] = selector.order(stack_scores(self.scores[key])[:, :candidates])
        return self.orders[name]

    def positions(self, offset: int, count: int, rows: int) -> Tensor:
        """Return position ids of `count` text tokens in `rows` rows, see `positions_after`.

        offset: distance of the first text token from the last prefilled token; at most 0 for a token that is fed again.
        """
        return positions_after(self.last_positions, offset, count, rows)


@torch.no_grad()
def prefill(
    session: Session,
    prompt: EncodedPrompt,
    cells: Sequence[CellSpec],
    lengths: Mapping[str, Lengths],
    meter: Meter,
    reserve: int,
) -> Prefilled:
    """Prefill a prompt once, score each layer for all cells, and return the full cache with the scores.

    Args:
        session: an open session of the model; after the call, the session observes nothing.
        prompt: the tokens to prefill.
        lengths: protocol -> lengths of the whole prompt.
        reserve: spare slots of the full cache for tokens that are appended.

    Raises:
        NonFiniteLogitsError: NaN in the logits of the last prompt token.
    """
    recording = Recording(cells, lengths, meter.now)
    cache = session.new_cache(reserve)
    session.expect(recording, prompt.types, prompt.identity)
    try:
        with vision_clock(session.model, meter.phase), meter.phase("prefill"):
            output = feed(session, prompt.inputs, cache, next(iter(lengths.values())).candidates)
        return _prefill_result(session, prompt, recording, cache, output, meter, [recording])
    finally:
        session.expect(None, None, prompt.identity)


@torch.no_grad()
def prefill_together(
    session: Session,
    prompts: Sequence[EncodedPrompt],
    cells: Sequence[CellSpec],
    lengths: Sequence[Mapping[str, Lengths]],
    meter: Meter,
    reserve: int,
) -> list[Prefilled]:
    """Prefill the common context of several prompts once, then the remaining tokens of each prompt.

    All results share one cache, which holds the first prompt at the end. Only the first result has the seconds of all prefills,
    and the scores of scorers that need the context fed again.

    Args:
        lengths: for each prompt, as for `prefill`.
        reserve: spare slots after the first prompt. They must hold what any other prompt has beyond the first prompt's length.

    Raises:
        NonFiniteLogitsError: NaN in the logits of a prompt's last token.
    """
    recordings = [Recording(cells, of_prompt, meter.now) for of_prompt in lengths]
    model, first_prompt, end = session.model, prompts[0], next(iter(lengths[0].values())).candidates
    cache = session.new_cache(reserve + first_prompt.length - end)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1, "return_dict": True}
    prefilled_prompts: list[Prefilled] = []
    context: PromptBatch | None = None
    session.expect(recordings[0], first_prompt.types[:, :end], first_prompt.identity)
    session.prompt_length = first_prompt.length  # so that the context's observations wait for the rest
    try:
        with vision_clock(model, meter.phase), meter.phase("prefill"):
            model(**first_prompt.context(end).inputs, **options)
        context, last_position = (
            session.prompt,
            last_positions(session.position_ids, end, first_prompt.input_ids.device),
        )
        assert context is not None, "it was just fed"
        states = cache.copy_states()
        for number in reversed(range(len(prompts))):
            prompt, recording = prompts[number], recordings[number]
            for layer in cache.compressed:
                layer.forget(layer.seen - end)
            cache.put_states(states)
            session.observe_rest(recording, context, prompt.length, prompt.types, prompt.identity)
            ids = prompt.input_ids[:, end:]
            with meter.phase("prefill"):
                output = model(
                    ids, position_ids=positions_after(last_position, 1, ids.shape[1], 1).contiguous(), **options
                )
            timed = [] if number else recordings
            prefilled_prompts.append(_prefill_result(session, prompt, recording, cache, output, meter, timed))
        cache.put_states(states)
    finally:
        if context is not None:
            context.observations.clear()  # they refer to it, and it to the cache
        session.prompt_length = None
        session.expect(None, None, first_prompt.identity)
    return [replace(one, states=cache.states) for one in reversed(prefilled_prompts)]


def _prefill_result(
    session: Session,
    prompt: EncodedPrompt,
    recording: Recording,
    cache: CompressedCache,
    output: Any,
    meter: Meter,
    timed: Sequence[Recording],
) -> Prefilled:
    """Return the result of a prefill, after the replays that its scorers need.

    Args:
        output: the model's output for the prompt's last token.
        timed: recordings whose scoring time is subtracted from the prefill time; if empty, nothing is timed or replayed.
    """
    positions, logits = session.position_ids, output.logits[0, -1].float()
    if bool(logits.isnan().any()):
        raise NonFiniteLogitsError("the prefill gave NaN logits")
    seconds = dict(meter.seconds) if timed else {}
    if timed:
        scoring = sum(sum(one.seconds.values()) for one in timed)
        seconds["prefill"] = max(seconds["prefill"] - scoring, 0.0)  # vision is part of it
    if timed and recording.needs.replay and session.prompt is not None:
        recording.replay(session.text, prompt.words, session.prompt)
    return Prefilled(
        prompt=prompt,
        lengths=recording.lengths,
        cache=cache,
        states=cache.states,
        logits=logits,
        last_positions=last_positions(positions, prompt.length, logits.device),
        scalings=[module.scaling for module in session.attentions],
        scores=recording.scores,
        summaries=recording.summaries,
        fallbacks=recording.fallbacks,
        failures=recording.failures,
        score_seconds=recording.seconds,
        seconds=seconds,
    )


def feed(session: Session, inputs: Mapping[str, Tensor], cache: CompressedCache, candidates: int) -> Any:
    """Prefill a prompt and return the model's output for the prompt's last token.

    A recurrent state cannot drop tokens. If layers have states and the tokens after the first `candidates` will be fed again,
    the first `candidates` tokens are fed separately, and the states after them are restored at the end.

    Args:
        inputs: arguments of the model's forward.
        cache: an empty cache of `session.new_cache`.
    """
    model, length = session.model, inputs["input_ids"].shape[1]
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1, "return_dict": True}
    if not session.has_states:
        return model(**inputs, **options)
    per_token = {name for name, value in inputs.items() if value.shape == inputs["input_ids"].shape}
    remaining_inputs, early = dict(inputs), session.prompt_length
    session.prompt_length = length
    try:
        if 0 < candidates < length:
            for layer in cache.compressed:  # room for both parts, as if they were fed at once
                layer.reserve += length - candidates
            model(**{k: v[:, :candidates] if k in per_token else v for k, v in inputs.items()}, **options)
            for layer in cache.compressed:
                layer.reserve -= length - candidates
            ids = inputs["input_ids"][:, candidates:]
            last_position = last_positions(session.position_ids, candidates, ids.device)
            remaining_inputs = {
                "input_ids": ids,
                "position_ids": positions_after(last_position, 1, ids.shape[1], ids.shape[0]),
            }
            if "attention_mask" in inputs:
                remaining_inputs["attention_mask"] = inputs["attention_mask"]
        copied_states = cache.copy_states() if candidates < length else None
        output = model(**remaining_inputs, **options)
    finally:
        session.prompt_length = early
    cache.put_states(cache.states if copied_states is None else copied_states)
    return output


def merge_scores(prefills: Sequence[Prefilled], cells: Sequence[CellSpec], protocol: str) -> None:
    """Replace the scores and summaries of the first prefill by means over all prefills, and the times by sums.

    Score columns after the context are dropped. A score that failed for one prompt counts as failed. Replay scores do not depend
    on the question and stay unchanged.

    Args:
        prefills: prefills of prompts that begin with the same context.
        cells: cells of `protocol`.
    """
    lengths = [one.lengths[protocol] for one in prefills]
    evicting = [cell for cell in cells if cell.evicts(lengths[0].reduced)]
    asking = [cell for cell in evicting if not cell.compressor.needs.replay]
    score_keys = {tuple(score_key(cell, one) for one in lengths) for cell in asking}
    summary_keys = {tuple(summary_key(cell, one) for one in lengths) for cell in evicting}
    prefills[0].seconds.update(
        {phase: sum(one.seconds.get(phase, 0.0) for one in prefills) for phase in prefills[0].seconds}
    )
    for keys in [*score_keys, *(keys for keys in summary_keys if keys[0] is not None)]:
        pairs = [(one, key) for one, key in zip(prefills, keys, strict=True) if key is not None]
        prefills[0].score_seconds[pairs[0][1]] = sum(one.score_seconds[key] for one, key in pairs)
        failed = [one.failures[key] for one, key in pairs if key in one.failures]
        if failed:
            prefills[0].failures[pairs[0][1]] = failed[0]
    for keys in score_keys:
        if keys[0] not in prefills[0].failures:
            layers = zip(*(one.scores[key] for one, key in zip(prefills, keys, strict=True)), strict=True)
            context = lengths[0].candidates
            prefills[0].scores[keys[0]] = [torch.stack([s[:, :context] for s in layer]).mean(0) for layer in layers]
            fallback_names = [
                fallback for one, key in zip(prefills, keys, strict=True) for fallback in one.fallbacks[key]
            ]
            prefills[0].fallbacks[keys[0]] = list(dict.fromkeys(fallback_names))
    for keys in summary_keys:
        if keys[0] is not None and keys[0] not in prefills[0].failures:
            summaries = [one.summaries[key] for one, key in zip(prefills, keys, strict=True) if key is not None]
            prefills[0].summaries[keys[0]] = {
                layer: torch.stack([part[layer] for part in summaries]).mean(0) for layer in summaries[0]
            }


@dataclass(eq=False)
class PrefillGroup:
    """One prefill of one prompt, with all that is needed to answer the prompt with the cells that share the prefill.

    Attributes:
        prompt: the whole prompt; `prefilled.prompt` has the prefilled tokens.
        longest: largest number of tokens that are fed as an answer; the dataset's reference answer counts.
    """

    model: nn.Module
    prompt: EncodedPrompt
    prefilled: Prefilled
    rules: DecodeRules
    tokenizer: Any
    meter: Meter
    longest: int
    timeout_s: float | None = None

    @property
    def heads(self) -> int:
        """Number of KV heads in all compressed layers together."""
        layers = self.prefilled.cache.compressed
        return layers[0].keys.shape[1] * len(layers)

    def reserve(self, protocol: str) -> int:
        """Return the spare slots of a reduced cache, for the fed prompt tokens and the longest answer."""
        return slack(self.longest, self.prefilled.lengths[protocol].fed)

    def room(self, protocol: str) -> int:
        """Return the largest number of slots that the fed prompt tokens and a generated answer take."""
        return self.prefilled.lengths[protocol].fed + self.rules.max_new_tokens - 1  # the answer's last is never fed

    def lead(self, protocol: str) -> tuple[Tensor, int]:
        """Return the prompt tokens to feed before the answer, int64 `[1, fed]`, and an offset.

        The offset is the distance of the first token that is fed from the last prefilled token. If `fed` is 0, this token is the
        first token of the answer.
        """
        lengths = self.prefilled.lengths[protocol]
        return self.prompt.input_ids[:, lengths.candidates :], 1 - lengths.forgotten


def slack(longest: int, fed: int) -> int:
    """Return the spare slots for `fed` prompt tokens and an answer of at most `longest` tokens."""
    return longest + fed + 1

"""`sharing=off`: one (method, budget) setting through `attach(model, compressor)` and transformers' `model.generate()`.

Layer-scope methods compress during the prefill here, and transformers decodes. In float32, `engine.Engine` must give the same
tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mmkv_bench import devices
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import DEFAULT_RESERVE
from mmkv_bench.compression.compressor import Compressor, full
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.listeners import AnswerAttention, PrefillListener
from mmkv_bench.compression.replay import NO_WORDS, ReplayText
from mmkv_bench.compression.second_prefill import prefill_kept_entries
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.generation.decode import EAGER_DECODE
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.meter import Meter, vision_clock
from mmkv_bench.generation.prefill import feed
from mmkv_bench.generation.result import (
    CellSpec,
    ForkResult,
    GenerationTimeout,
    NonFiniteLogitsError,
    blank,
    describe,
    fill_answer,
    fill_asked,
    fill_stored,
    status_of,
)
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.stream import run_streams
from mmkv_bench.protocols import DEFAULT, Lengths
from mmkv_bench.protocols import protocol as protocol_named


class _Watch(LogitsProcessor):
    """Logits processor that records the time of each decode step and raises after the deadline. Logits are not changed."""

    def __init__(self, meter: Meter, deadline: float | None):
        self.meter, self.deadline = meter, deadline
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(self.meter.now())
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise GenerationTimeout("decoding ran past timeout_s")
        return scores


@dataclass
class SingleRunOutput:
    """Output of `generate_alone`: `sequences` int64 `[B, T + new]`, `logits` float32 `[B, V]` per new token, the session."""

    sequences: Tensor
    logits: tuple[Tensor, ...]
    session: Session


@torch.no_grad()
def generate_alone(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    compressor: Compressor,
    budget: Budget | None = None,
    protocol: str = DEFAULT,
    *,
    context: int | None = None,
    seed: int = 0,
    identity: str = "prompt",
    token_types: Tensor | None = None,
    attention: str | None = None,
    answer: AnswerAttention | None = None,
    compile_config: CompileConfig | None = None,
    replay: ReplayText = NO_WORDS,
    **generation,
) -> SingleRunOutput:
    """Generate an answer with one compressor attached, through stock `generate()`.

    Args:
        inputs: arguments of `generate()`, `input_ids` `[B, T]` and media included.
        context: number of context tokens, for protocols that separate context and question.
        answer: `answer_of_full` of the same arguments; None: computed here if the compressor needs the answer.
        compile_config: configuration of a compiled decode step; None: decode eagerly. A decode policy that acts is always eager.
        replay: see `attach`.
        generation: further arguments of `generate()`, for greedy decoding.

    Raises:
        ConfigError: the protocol separates context and question, but `context` is missing or not inside the prompt.
    """
    ids, protocol_rules = inputs["input_ids"], protocol_named(protocol)
    if protocol_rules.cuts and not (context is not None and 0 < context < ids.shape[1]):
        raise ConfigError(
            f"protocol={protocol} got context={context}; allowed: 1 to {ids.shape[1] - 1} tokens of this prompt, "
            "counted up to the last visual token's closing marker"
        )
    if protocol_rules.prefills_again:
        compressor.check_only_evicts(protocol)
    lengths = protocol_rules.lengths(ids.shape[1], context)
    evicts_entries = (
        budget is not None and not compressor.unbudgeted and budget.entries_for(lengths.reduced) < lengths.reduced
    )
    if evicts_entries and compressor.needs.answer and answer is None:
        answer = answer_of_full(
            model,
            inputs,
            protocol,
            context=context,
            identity=identity,
            token_types=token_types,
            attention=attention,
            **generation,
        )
    compiled = compile_config is not None and not stays_eager(compressor, evicts_entries)
    # Without a mask generate() treats every pad id as padding, also those that are text of the prompt.
    inputs = {"attention_mask": torch.ones_like(ids), **inputs}
    options = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, **generation}
    with attach(
        model,
        compressor,
        budget,
        protocol,
        seed,
        prompt_tokens=ids.shape[1],
        identity=identity,
        token_types=None if token_types is None else token_types[:, : lengths.prefilled],
        attention=attention,
        answer=answer,
        context=context if protocol_rules.cuts else None,
        replay=replay,
        # Tokens that are prefilled and fed again keep their slots; an answer's last token is never fed.
        reserve=lengths.prompt - lengths.prefilled + _new_tokens(model, generation) - 1,
        fixed=compiled,
    ) as session:
        if compressor.is_full:
            session.answer = answer
        if compiled:
            options["compile_config"] = compile_config
        if not lengths.fed:
            if compiled:
                options["past_key_values"] = session.new_cache()
            output = model.generate(**inputs, **options)
            return SingleRunOutput(output.sequences, output.logits, session)
        prefix = {
            name: value[:, : lengths.prefilled] if value.ndim == 2 and value.shape == ids.shape else value
            for name, value in inputs.items()
        }
        feed(session, prefix, session.new_cache(), lengths.candidates)
        if protocol_rules.prefills_again and evicts_entries:
            again_prefilled = prefill_kept_entries(session, prefix, session.kept())
            for layer, (key, value) in zip(session.latest_cache.compressed, again_prefilled, strict=True):
                layer.replace(key, value)
        # The prompt again, whole: generate() feeds what the cache has not seen (the last token, or the question).
        output = model.generate(
            input_ids=ids, attention_mask=inputs["attention_mask"], past_key_values=session.cache, **options
        )
        return SingleRunOutput(output.sequences, output.logits, session)


def stays_eager(compressor: Compressor, evicts: bool) -> bool:
    """Tell whether a decode policy acts, so that decode steps cannot be compiled. evicts: prompt entries are evicted."""
    return compressor.decoding is not None and (evicts or compressor.quantises)


def _new_tokens(model: PreTrainedModel, generation: dict) -> int:
    """Return the largest number of tokens of an answer; `DEFAULT_RESERVE` if no limit is set."""
    limit = generation.get("max_new_tokens", model.generation_config.max_new_tokens)
    return DEFAULT_RESERVE if limit is None else int(limit)


@torch.no_grad()
def answer_of_full(
    model: PreTrainedModel, inputs: dict[str, Tensor], protocol: str = DEFAULT, *, context: int | None = None, **options
) -> AnswerAttention:
    """Return how much the full cache's answer attends to each entry, collected through transformers' `generate()`.

    The arguments are those of `generate_alone`.

    Raises:
        UnsupportedError: several prompts, or a padded one.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if len(ids) > 1 or (mask is not None and not bool(mask.all())):
        raise UnsupportedError(
            f"the answer of the full cache is collected for one prompt without padding; got {len(ids)} prompts"
            f"{'' if mask is None else ' with an attention mask'}; give one prompt"
        )
    answer = AnswerAttention(protocol_named(protocol).lengths(ids.shape[1], context).prefilled)
    generate_alone(model, inputs, full(), None, protocol, context=context, answer=answer, **options)
    return answer


def run_alone(
    model: PreTrainedModel,
    family: ModelFacts,
    rules: DecodeRules,
    tokenizer,
    prompt: EncodedPrompt,
    cell: CellSpec,
    *,
    timeout_s: float | None = None,
    attention: str | None = None,
    compile_config: CompileConfig | None = None,
) -> ForkResult:
    """Answer one prompt with one cell and a prefill of its own; return the result. An error becomes the result's status.

    compile_config: see `generate_alone`. A cell that cannot be compiled gets the fallback `EAGER_DECODE`.
    """
    if protocol_named(cell.protocol).streams:
        with Session(model, None, attention=attention, packs=False) as session:
            return run_streams(session, family, rules, tokenizer, prompt, [cell], timeout_s, "own")[0]
    device = next(model.parameters()).device
    meter = Meter(device)
    result = blank(cell, prompt, measured="own", fork_batch=1, fork_rows=1)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    stopping_criterion = _Watch(meter, deadline)
    try:
        protocol_rules = protocol_named(cell.protocol)
        lengths = lengths_of(protocol_rules, prompt, family)
        result.context_tokens = lengths.reduced
        if protocol_rules.cuts:
            result.question_text_before_cut = prompt.question_text_before_cut
        start, answer = meter.now(), None
        common: dict[str, Any] = {
            "context": lengths.reduced if protocol_rules.cuts else None,
            "identity": prompt.document.identity
            if prompt.document is not None and cell.serves_all_questions
            else prompt.identity,
            "token_types": prompt.types,
            "attention": attention,
            **rules.options,
        }
        with vision_clock(model, meter.phase), meter.phase("all"):
            if cell.evicts(lengths.reduced) and cell.compressor.needs.answer:
                watching = LogitsProcessorList([_Watch(meter, deadline)])
                answer = answer_of_full(model, prompt.inputs, cell.protocol, logits_processor=watching, **common)
                result.compress_s = meter.now() - start
            output = generate_alone(
                model,
                prompt.inputs,
                cell.compressor,
                cell.budget,
                cell.protocol,
                seed=cell.seed,
                answer=answer,
                logits_processor=LogitsProcessorList([stopping_criterion]),
                compile_config=compile_config,
                replay=prompt.words,
                **common,
            )
        for step, logits in enumerate(output.logits, 1):
            if bool(logits.isnan().any()):
                raise NonFiniteLogitsError(f"NaN logits at new token {step}")
        _fill(result, cell, prompt, output, lengths, rules, tokenizer)
        if compile_config is not None and stays_eager(cell.compressor, cell.evicts(lengths.reduced)):
            result.fallback.append(EAGER_DECODE)
        result.vision_s = meter.seconds.get("vision")
        result.ttft_s = stopping_criterion.times[0] - start
        steps = len(stopping_criterion.times) - 1
        result.decode_s = stopping_criterion.times[-1] - stopping_criterion.times[0]
        result.tpot_s = result.decode_s / steps if steps else None
    except Exception as error:  # noqa: BLE001 - the cell's status says what happened; other cells go on
        result.status, result.error = status_of(error), describe(error)
        devices.at(device).release()
    result.peak_device_bytes, result.peak_resident_bytes = meter.peak_device(), meter.peak_resident()
    return result


def fill_account(result: ForkResult, cell: CellSpec, lengths: Lengths, session: Session, types: Tensor | None) -> None:
    """Fill the columns of requested budget, fallbacks and stored bytes, for a prompt that a session of `attach` has reduced.

    types: int `[T]` types of the tokens that the budget C counts; None if unknown.
    """
    listener, compressor = session.listener, cell.compressor
    assert isinstance(listener, PrefillListener), "the session of `attach`"
    kept_indices = [index[0] for index in session.kept()]
    fill_asked(result, cell, lengths, kept_indices[0].shape[0] * len(kept_indices), types)
    if cell.evicts(lengths.reduced):
        context = Context(cell.entries(lengths.reduced), lengths.reduced, lengths.refed, types, listener.summaries[0])
        fallbacks = [
            *listener.observed[0],
            *compressor.outcome(context),
            *compressor.answer_fallbacks(listener.answer_steps),
        ]
        result.fallback = list(dict.fromkeys([*result.fallback, *fallbacks]))
    # Counted from the tensors right after the reduction; a token that is fed again will take one entry per head.
    layer_counts = [listener.accounts[layer][0] for layer in range(len(kept_indices))]
    fill_stored(result, cell, lengths, kept_indices, layer_counts, listener.slot_nbytes, listener.state_nbytes)


def _fill(
    result: ForkResult,
    cell: CellSpec,
    prompt: EncodedPrompt,
    output: SingleRunOutput,
    lengths: Lengths,
    rules: DecodeRules,
    tokenizer,
) -> None:
    fill_account(result, cell, lengths, output.session, prompt.types[0, : lengths.reduced])
    tokens = output.sequences[0, prompt.length :].tolist()
    finish = rules.finish(output.sequences, len(tokens))
    fill_answer(result, cell, lengths, tokens, finish, rules.text(tokens, finish, tokenizer))
    result.entries_end = sum(int(layer.entries()[0].sum()) for layer in output.session.latest_cache.compressed)

"""protocol=turns: the questions about a document are asked one after the other, in a conversation with the model's answers.

The first turn equals `query_aware`. Before each further question, the previous turn (question and answer) is fed again in one
forward pass. Every layer is then scored by this turn's queries, and every KV head is reduced to the budget, so earlier turns and
the document compete for entries. The new question is fed next; its entries do not count against the budget.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.entry_counts import account
from mmkv_bench.compression.positions import positions_after
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamListener, check_turns
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.generation.decode import Decoded, decode
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.forks import audit, check_time, gather, plan
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import PrefillGroup, prefill, slack
from mmkv_bench.generation.result import (
    CellSpec,
    ForkResult,
    GenerationTimeout,
    blank,
    describe,
    fill_answer,
    fill_asked,
    fill_stored,
    status_of,
)
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.protocols import Lengths, protocol


class Parts(NamedTuple):
    """Model and settings of all turns. timeout_s: limit for scoring the document, and for feeding and answering a turn."""

    session: Session
    family: ModelFacts
    rules: DecodeRules
    tokenizer: Any
    timeout_s: float | None


@dataclass
class Conversation:
    """State of a cell's conversation after some turns.

    Attributes:
        document: the document's identity.
        turns: number of answered turns.
        group: the latest turn's prefill and prompt.
        cache: kept entries of the document and earlier turns, then all entries of the latest turn.
        cap: the document's budget C in entries per KV head; None for the full cache.
        last_answer: tokens of the latest answer, int64 `[1, n]`, without the end token.
        fed: number of tokens of the latest turn in the cache.
        listener: evicts entries, and counts evictions.
        rows: question number -> result, for answered turns whose results have not been requested yet.
    """

    document: str
    turns: int
    group: PrefillGroup
    cache: CompressedCache
    cap: int | None
    last_answer: Tensor
    fed: int
    listener: StreamListener
    rows: dict[int, ForkResult] = field(default_factory=dict)


def run_turns(parts: Parts, held: dict[str, Conversation], prompt: EncodedPrompt, cell: CellSpec) -> ForkResult:
    """Answer one prompt, a turn of a conversation, with one cell; return the result. An error becomes the result's status.

    Turns before the prompt's turn are answered first. A result therefore does not depend on the questions that a run asks, nor on
    their order.

    held: cell -> the conversation so far.
    """
    session, device = parts.session, next(parts.session.model.parameters()).device
    document = prompt.document
    order = [0] if document is None else document.order
    number = 0 if document is None else document.number
    identity = prompt.identity if document is None else document.identity
    meter, result = Meter(device), blank(cell, prompt, fork_batch=1, fork_rows=1)
    try:
        session.check_method(cell.compressor, protocol(cell.protocol))
        check_turns(cell.compressor)
        conversation = held.pop(cell.cell, None)
        if conversation is not None and (
            conversation.document != identity
            or (conversation.turns > order.index(number) and number not in conversation.rows)
        ):
            conversation = None
        for turn in range(0 if conversation is None else conversation.turns, order.index(number) + 1):
            meter, question_prompt = Meter(device), prompt if document is None else document.questions[order[turn]]
            result = blank(cell, question_prompt, fork_batch=1, fork_rows=1)
            if conversation is None:
                conversation = _first_turn(parts, question_prompt, cell, identity, meter, result)
            else:
                assert document is not None, "a further turn is a further question"
                conversation = _next_turn(
                    parts, conversation, document.turns[turn - 1], question_prompt.identity, cell, meter, result
                )
            result.question_known = None if document is None else ",".join(map(str, order[: turn + 1]))
            result.peak_device_bytes, result.peak_resident_bytes = meter.peak_device(), meter.peak_resident()
            conversation.rows[order[turn]] = result
        assert conversation is not None, "at least one turn was answered"
        held[cell.cell] = conversation
        return conversation.rows.pop(number)
    except Exception as error:  # noqa: BLE001 - the cell's status says what happened; other cells go on
        result = blank(cell, prompt, fork_batch=1, fork_rows=1)
        result.status, result.error = status_of(error), describe(error)
        devices.at(device).release()
    result.peak_device_bytes, result.peak_resident_bytes = meter.peak_device(), meter.peak_resident()
    return result


def _first_turn(
    parts: Parts, prompt: EncodedPrompt, cell: CellSpec, identity: str, meter: Meter, result: ForkResult
) -> Conversation:
    """Compress the document for the first question, as `query_aware` does, answer the question, and fill `result`."""
    session, rules = parts.session, parts.rules
    lengths = lengths_of(protocol(cell.protocol), prompt, parts.family)
    reserve = slack(rules.max_new_tokens, lengths.fed)
    prefilled = prefill(session, prompt, [cell], {cell.protocol: lengths}, meter, reserve)
    group = PrefillGroup(
        session.model, prompt, prefilled, rules, parts.tokenizer, meter, rules.max_new_tokens, parts.timeout_s
    )
    fill_asked(result, cell, lengths, group.heads, prompt.types[0])
    fork = plan(prefilled, cell, result)
    if fork.index is None:
        cache = prefilled.cache
        for layer in cache.compressed:
            layer.forget(lengths.forgotten)
    else:
        cache = gather(prefilled, [fork], group.reserve(cell.protocol))
    audit([fork], cache.compressed, group)
    result.vision_s, result.prefill_s = prefilled.seconds.get("vision"), prefilled.seconds["prefill"]
    result.compress_s, result.question_text_before_cut = fork.compress_s, prompt.question_text_before_cut
    check_time(fork, parts.timeout_s)
    result.context_tokens = lengths.reduced
    cap = None if cell.compressor.unbudgeted else cell.entries(lengths.reduced)
    listener = StreamListener(cell.compressor, cap, cell.seed, reserve=reserve, phases=meter.phase)
    listener.entries_max = max(layer.stored for layer in cache.compressed)
    conversation = Conversation(identity, 0, group, cache, cap, prompt.input_ids[:, :0], 0, listener)
    return _answer_question(conversation, cell, result, _deadline(parts))


def _next_turn(
    parts: Parts, talk: Conversation, between: Tensor, identity: str, cell: CellSpec, meter: Meter, result: ForkResult
) -> Conversation:
    """Evict the entries of a conversation that exceed the budget, answer the next question, and fill `result`.

    between: int64 `[1, n]`, tokens between the latest answer and the next answer (`turn_tokens`). identity: the next question's.
    """
    previous_group, name, deadline = talk.group, cell.protocol, _deadline(parts)
    context = torch.cat([previous_group.prompt.input_ids, talk.last_answer], 1)
    logits, last_position = _feed_latest_turn(parts, talk, cell, meter)
    if deadline is not None and time.monotonic() > deadline:
        raise GenerationTimeout(f"feeding turn {talk.turns} again ran past timeout_s")
    ids = torch.cat([context, between.to(context.device)], 1)
    max_context = parts.family.max_context
    if max_context is not None and ids.shape[1] + parts.rules.max_new_tokens - 1 > max_context:
        raise UnsupportedError(
            f"the conversation has {ids.shape[1]} tokens before answer {talk.turns + 1} of up to "
            f"{parts.rules.max_new_tokens} tokens, but the model's context is {max_context}; lower max_new_tokens"
        )
    types = torch.nn.functional.pad(previous_group.prompt.types, (0, ids.shape[1] - previous_group.prompt.length))
    prompt = replace(previous_group.prompt, identity=identity, inputs={"input_ids": ids}, types=types)
    seen = context.shape[1]
    lengths = Lengths(ids.shape[1], prefilled=seen, reduced=seen, candidates=seen)
    prefilled = replace(
        previous_group.prefilled,
        prompt=prompt.context(seen),
        lengths={name: lengths},
        cache=talk.cache,
        logits=logits,
        last_positions=last_position,
        scores={},
    )
    group = replace(previous_group, prompt=prompt, prefilled=prefilled, meter=meter)
    layers, listener = talk.cache.compressed, talk.listener
    capped = cell if talk.cap is None else replace(cell, budget=Budget.parse(talk.cap))
    fill_asked(result, capped, lengths, group.heads, types[0])
    index = [layer.slot_positions()[0] for layer in layers]
    layer_counts = [account(layer, lengths.fed) for layer in layers]
    fill_stored(result, capped, lengths, index, layer_counts, layers[0].slot_nbytes)
    result.prompt_tokens, result.context_tokens = prompt.length, seen
    result.fallback = list(dict.fromkeys([*result.fallback, *listener.fallbacks]))
    result.compress_s = meter.seconds.get("compress", 0.0)
    result.prefill_s = max(meter.seconds["prefill"] - result.compress_s, 0.0)
    return _answer_question(replace(talk, group=group), capped, result, deadline)


@torch.no_grad()
def _feed_latest_turn(parts: Parts, talk: Conversation, cell: CellSpec, meter: Meter) -> tuple[Tensor, Tensor]:
    """Feed the latest turn again, and evict the entries that exceed the budget.

    Returns:
        Logits `[V]` and position ids of the turn's last token.
    """
    session, group, cache = parts.session, talk.group, talk.cache
    lead, offset = group.lead(cell.protocol)
    turn = torch.cat([lead, talk.last_answer], 1)
    for layer in cache.compressed:
        layer.forget(talk.fed)
    talk.listener.phases = meter.phase
    seen = cache.get_seq_length() + turn.shape[1]
    session.observe_turn(talk.listener, cache, seen, talk.document, talk.turns)
    try:
        with meter.phase("prefill"):
            positions = group.prefilled.positions(offset, turn.shape[1], 1).contiguous()
            output = session.model(
                input_ids=turn,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                return_dict=True,
            )
    finally:
        session.expect(None, None, talk.document)
    last_position = positions_after(group.prefilled.last_positions, offset + turn.shape[1] - 1, 1, 1)
    return output.logits[0, -1].float(), last_position


def _deadline(parts: Parts) -> float | None:
    return None if parts.timeout_s is None else time.monotonic() + parts.timeout_s


def _answer_question(talk: Conversation, cell: CellSpec, result: ForkResult, deadline: float | None) -> Conversation:
    """Decode the answer to the latest question, fill the result, and return the conversation with the answer."""
    group, cache, name = talk.group, talk.cache, cell.protocol
    start = group.meter.now()
    answer: Decoded = decode(group, cache, 1, name, deadline)[0]
    result.decode_s = group.meter.now() - start
    if answer.error is not None:
        raise answer.error
    lengths, listener = group.prefilled.lengths[name], talk.listener
    text = group.rules.text(answer.tokens, answer.finish, group.tokenizer)
    fill_answer(result, cell, lengths, answer.tokens, answer.finish, text)
    result.entries_end = sum(int(layer.entries().sum()) for layer in cache.compressed)
    result.tpot_s = result.decode_s / result.n_tokens
    result.entries_max, result.entries_peak = listener.entries_max, max(listener.entries_peak, listener.entries_max)
    result.eviction_rounds, result.entries_evicted = listener.rounds, listener.evicted
    answer_tokens = _without_end(answer.tokens, answer.finish)
    return replace(
        talk,
        turns=talk.turns + 1,
        last_answer=torch.tensor([answer_tokens], dtype=torch.int64, device=group.prompt.input_ids.device).view(1, -1),
        fed=lengths.fed + len(answer.tokens) - 1,
    )


def _without_end(tokens: Sequence[int], finish: str | None) -> list[int]:
    """Return an answer without the end token, which the chat template writes again."""
    return list(tokens[:-1] if finish == "eos" else tokens)

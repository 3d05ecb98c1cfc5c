"""protocol=stream: a video, pictures or a text are read chunk by chunk under a hard cap, then the question is answered.

A layer never holds more than the cap and a chunk. Each cell needs a separate prefill, because what it evicts changes
the states of later tokens. The stream is read once for all questions about a document.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression.account import account
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compaction import Compaction, check_rope
from mmkv_bench.compression.positions import last_positions
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamLayer, StreamListener, check_streams
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.families.registry import check_no_states
from mmkv_bench.generation.decode import decode
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.forks import borrow
from mmkv_bench.generation.meter import Meter, vision_clock
from mmkv_bench.generation.prefill import Prefilled, PrefillGroup, slack
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
from mmkv_bench.generation.stream_reader import Reader
from mmkv_bench.protocols import protocol


@torch.no_grad()
def read(
    session: Session,
    reader: Reader,
    listener: StreamListener,
    meter: Meter,
    deadline: float | None = None,
    identity: str | None = None,
) -> tuple[CompressedCache, Tensor]:
    """Feed all chunks; return the cache and the logits `[V]` of the last token before the question.

    Args:
        session: open on the model; afterwards it observes nothing. identity: seeds random draws; None: the prompt's.

    Raises:
        GenerationTimeout, NonFiniteLogitsError.
    """
    prompt, length = reader.prompt, reader.length
    cache = CompressedCache.of([StreamLayer(listener.room) for _ in session.attentions])
    session.expect(listener, prompt.types[:, :length], identity or prompt.identity)
    if reader.compact:
        check_rope(session.text.config)
        listener.compaction = Compaction(reader.positions[..., 0, :length].view(-1, length), session.rope)
    session.prompt_length, logits = length + reader.asked, torch.empty(0)
    try:
        with vision_clock(session.model, meter.phase), meter.phase("prefill"):
            for clip in reader.clips:
                if deadline is not None and time.monotonic() > deadline:
                    raise GenerationTimeout("reading the stream ran past timeout_s")
                inputs = reader.inputs(clip)
                output = session.model(
                    **inputs, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True
                )
                logits = output.logits[0, -1].float()
    finally:
        session.prompt_length = None
        session.expect(None, None, prompt.identity)
    if bool(logits.isnan().any()):
        raise NonFiniteLogitsError("the stream gave NaN logits")
    return cache, logits


class Held(NamedTuple):
    """A stream that was read for one cell, before its question; kept for the other questions about the same document.

    Attributes:
        document: identifies the document and the length of the stream. seconds: time of reading it, by phase.
    """

    document: Hashable
    listener: StreamListener
    cache: CompressedCache
    logits: Tensor
    seconds: dict[str, float]


def run_stream(
    session: Session,
    family: ModelFacts,
    rules: DecodeRules,
    tokenizer: Any,
    prompt: EncodedPrompt,
    cell: CellSpec,
    timeout_s: float | None = None,
    measured: str = "group",
    held: dict[str, Held] | None = None,
) -> ForkResult:
    """Return one cell's result for one prompt; a fault becomes its status.

    Args:
        session: open on the model. measured: as in rows; `own` under `sharing=off`.
        held: cell -> the stream that it read last, so that a document is read once for all of its questions; None: each
            question reads its own stream.
    """
    device = next(session.model.parameters()).device
    meter = Meter(device)
    result = blank(cell, prompt, measured=measured, fork_batch=1, fork_rows=1)
    try:
        _stream(session, family, rules, tokenizer, prompt, cell, timeout_s, meter, result, {} if held is None else held)
    except Exception as error:  # noqa: BLE001 - the cell's status says what happened; other cells go on
        result.status, result.error = status_of(error), describe(error)
        devices.at(device).release()
    result.peak_device_bytes, result.peak_resident_bytes = meter.peak_device(), meter.peak_resident()
    return result


def _stream(
    session: Session,
    family: ModelFacts,
    rules: DecodeRules,
    tokenizer: Any,
    whole: EncodedPrompt,
    cell: CellSpec,
    timeout_s: float | None,
    meter: Meter,
    result: ForkResult,
    held: dict[str, Held],
) -> None:
    check_streams(cell.compressor, cell.budget)
    check_no_states(family.rules, bool(family.states.layers))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    reader = Reader(session.model, family, whole, cell)
    prompt, clips = reader.prompt, reader.clips
    lengths = lengths_of(protocol(cell.protocol), prompt, family)
    result.prompt_tokens, result.context_tokens, result.visual_tokens = (
        prompt.length,
        lengths.reduced,
        prompt.visual_tokens,
    )
    result.question_text_before_cut = prompt.question_text_before_cut
    document = None if whole.document is None else (whole.document.identity, lengths.reduced)
    stream = held.pop(cell.cell, None)
    if stream is not None and (document is None or stream.document != document):
        stream = None
    if document is not None:
        result.question_known, result.compression_reused = "none", stream is not None
    if stream is None:
        longest = (
            lengths.fed
            if whole.document is None
            else max(lengths.fed, whole.document.longest - whole.length + lengths.fed)
        )
        room = reader.asked + max(*(clip.end - clip.start for clip in clips), slack(rules.max_new_tokens, longest))
        cap = None if cell.budget is None else cell.entries(lengths.reduced)
        listener = StreamListener(cell.compressor, cap, cell.seed, reader.frames, room, reader.asked, meter.phase)
        identity = prompt.identity if whole.document is None else whole.document.identity
        cache, logits = read(session, reader, listener, meter, deadline, identity)
        stream = Held(document, listener, cache, logits, dict(meter.seconds))
    listener, cache, logits = stream.listener, stream.cache, stream.logits
    heads = cache.layers[0].keys.shape[1] * len(cache.layers)
    fill_asked(result, cell, lengths, heads, prompt.types[0])
    result.fallback = list(dict.fromkeys([*result.fallback, *listener.fallbacks]))
    index = [layer.slot_positions()[0] for layer in cache.layers]
    counted = [account(layer, lengths.fed) for layer in cache.layers]
    fill_stored(result, cell, lengths, index, counted, cache.layers[0].slot_nbytes)
    result.entries_max, result.entries_peak = listener.entries_max, listener.entries_peak
    result.eviction_rounds, result.entries_evicted = listener.rounds, listener.evicted
    result.frames_left = reader.frames_left(cache)
    prefilled = Prefilled(
        prompt=prompt.context(lengths.reduced),
        lengths={cell.protocol: lengths},
        cache=cache,
        states={},
        logits=logits,
        last_positions=last_positions(reader.positions[..., : lengths.reduced], lengths.reduced, logits.device),
        scalings=[module.scaling for module in session.attentions],
        scores={},
        summaries={},
        fallbacks={},
        failures={},
        score_seconds={},
    )
    group = PrefillGroup(session.model, prompt, prefilled, rules, tokenizer, meter, rules.max_new_tokens, timeout_s)
    start = meter.now()
    with borrow(prefilled, cell.protocol):
        (answer,) = decode(group, cache, 1, cell.protocol, deadline)
        result.entries_end = sum(int(layer.entries().sum()) for layer in cache.layers)
    if document is not None:
        held[cell.cell] = stream
    result.decode_s = meter.now() - start
    if answer.error is not None:
        raise answer.error
    text = rules.text(answer.tokens, answer.finish, tokenizer)
    fill_answer(result, cell, lengths, answer.tokens, answer.finish, text)
    result.vision_s, result.compress_s = stream.seconds.get("vision"), stream.seconds.get("compress", 0.0)
    result.prefill_s = max(stream.seconds["prefill"] - result.compress_s, 0.0)
    result.tpot_s = result.decode_s / result.n_tokens

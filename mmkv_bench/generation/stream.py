"""protocol=stream: a video (or a text) is read chunk by chunk under a hard cap, then the question is answered.

Position ids of the whole stream are computed once and sliced; the vision tower runs on the frames of one chunk at a time, so
that a layer never holds more than the cap and a chunk. Each cell has a prefill of its own: what it evicts changes what later
tokens become.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.compression.account import account
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.observation import Frames
from mmkv_bench.compression.positions import following, last_positions
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamLayer, StreamListener, check_streams
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.families.registry import check_chunks, check_no_states
from mmkv_bench.generation.decode import decode
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
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
from mmkv_bench.protocols import protocol

PIXELS, GRID = "pixel_values_videos", "video_grid_thw"


class Clip(NamedTuple):
    """One chunk: tokens `start` to `end`, with temporal patches `first` to `last` of the video (none of a text)."""

    start: int
    end: int
    first: int = 0
    last: int = 0


class Reader:
    """A prompt as a stream: its chunks, and the model's inputs of each.

    Args:
        prompt: the whole prompt, pixels of all frames included. cell: its chunks, and where the question comes.

    Attributes:
        prompt: up to where the question comes, and the question. length: tokens before the question.
        asked: tokens of the chat template that are fed behind every chunk and forgotten again.
        clips: the chunks; positions: position ids of the whole prompt, `[3, 1, T]` or `[1, T]`.

    Raises:
        UnsupportedError: pictures, several videos, text before the video, or a family whose videos come in no chunks.
        ConfigError: chunks that are no whole number of temporal patches.
    """

    def __init__(self, model: Any, family: ModelFacts, prompt: EncodedPrompt, cell: CellSpec):
        settings = cell.stream
        _check_media(family, prompt)
        self.video = GRID in prompt.inputs
        self.patch = int(model.config.vision_config.temporal_patch_size) if self.video else 1
        if settings.every is not None and settings.every % self.patch:
            raise ConfigError(
                f"stream.every={settings.every} frames divide no temporal patch of {self.patch} frames, which {family.name} "
                f"reads at once; give a multiple of {self.patch}"
            )
        self.prompt = self._until(prompt, family, cell)
        self.length = lengths_of(protocol(cell.protocol), self.prompt, family).reduced
        self.positions = _positions(model, self.prompt, self.video)
        every = None if settings.every is None else settings.every // self.patch
        self.clips = list(self._divided(every))
        self.frames = self._frames() if self.video else None
        self.asked = self._asked(cell)

    def inputs(self, clip: Clip) -> dict[str, Tensor]:
        """Return what the model is given of one chunk; behind it, where a method asks, the chat template's tokens."""
        ids, positions = self.prompt.input_ids[:, clip.start : clip.end], self.positions[..., clip.start : clip.end]
        if self.asked:
            last = last_positions(self.positions[..., : clip.end], clip.end, ids.device)
            ids = torch.cat([ids, self.prompt.input_ids[:, -self.asked :]], 1)
            positions = torch.cat([positions, following(last, 1, self.asked, 1)], -1)
        inputs = {"input_ids": ids, "position_ids": positions}
        if clip.first < clip.last:
            grid = self.prompt.inputs[GRID]
            rows = int(grid[0, 1:].prod())
            inputs[PIXELS] = self.prompt.inputs[PIXELS][clip.first * rows : clip.last * rows]
            inputs[GRID] = grid.new_tensor([[clip.last - clip.first, *grid[0, 1:].tolist()]])
        return inputs

    def frames_left(self, cache: CompressedCache) -> str | None:
        """Return the frames of which a head of a layer holds an entry, as ranges."""
        if self.frames is None:
            return None
        places = torch.cat([layer.slot_positions().flatten() for layer in cache.layers]).unique()
        patches = self.frames.number[places].unique()
        frames = [int(one) * self.patch + part for one in patches if one >= 0 for part in range(self.patch)]
        return ranges(frames)

    def _asked(self, cell: CellSpec) -> int:
        """Return the number of the template's tokens that the method asks behind every chunk."""
        scorer = cell.compressor.scorer
        if scorer is None or not scorer.asks_template:
            return 0
        if not 0 < self.prompt.template_tokens < self.prompt.length - self.length:
            raise UnsupportedError(
                f"{self.prompt.identity} has no chat template behind its question, and {cell.compressor.name} scores by its "
                "tokens; choose a model with a chat template, or another method"
            )
        return min(self.prompt.template_tokens, scorer.needs.tail_queries)

    def _places(self, prompt: EncodedPrompt) -> Tensor:
        """Return the places of the video's tokens, int64 `[patches, cells]`."""
        count = int(prompt.inputs[GRID][0, 0])
        return (prompt.types[0] > 0).nonzero()[:, 0].view(count, -1)

    def _until(self, prompt: EncodedPrompt, family: ModelFacts, cell: CellSpec) -> EncodedPrompt:
        """Return the prompt without what comes after the question was asked."""
        share = cell.stream.ask_at
        if share == 1:
            return prompt
        if not self.video:
            length = lengths_of(protocol(cell.protocol), prompt, family).reduced
            kept = max(1, int(length * share))
            return replace(_without(prompt, kept, length), context_tokens=kept)
        places, ids = self._places(prompt), prompt.input_ids[0].tolist()
        seen = max(1, int(len(places) * share))
        first, last = int(places[seen - 1, -1]) + 1, int(places[-1, -1]) + 1
        if seen < len(places) and ids[first] in family.closing_token_ids:  # every patch has a marker of its own
            first, last = first + 1, last + 1
        shorter, grid = _without(prompt, first, last), prompt.inputs[GRID].clone()
        grid[0, 0] = seen
        pixels = prompt.inputs[PIXELS][: int(grid.prod())]
        return replace(shorter, inputs={**shorter.inputs, GRID: grid, PIXELS: pixels})

    def _divided(self, every: int | None) -> Iterator[Clip]:
        if not self.video:
            step = every or self.length
            yield from (Clip(start, min(start + step, self.length)) for start in range(0, self.length, step))
            return
        places = self._places(self.prompt)
        step = every or len(places)
        firsts = [*range(0, len(places), step), len(places)]
        ends = [*(int(places[first - 1, -1]) + 1 for first in firsts[1:-1]), self.length]
        for (first, last), (start, end) in zip(pairwise(firsts), pairwise([0, *ends]), strict=True):
            yield Clip(start, end, first, last)

    def _frames(self) -> Frames:
        places = self._places(self.prompt)
        number = torch.full((self.length,), -1, device=places.device)
        cell, (patches, cells) = torch.zeros_like(number), places.shape
        number[places] = torch.arange(patches, device=places.device)[:, None].expand(-1, cells)
        cell[places] = torch.arange(cells, device=places.device).expand(patches, -1)
        return Frames(number, cell, cells)


def _check_media(family: ModelFacts, prompt: EncodedPrompt) -> None:
    """Refuse prompts that are no stream."""
    if not prompt.visual_tokens:
        return
    check_chunks(family.rules)
    if bool((prompt.types == 1).any()) or len(prompt.inputs[GRID]) != 1:
        raise UnsupportedError(
            f"{prompt.identity} has pictures or several videos, and protocol=stream reads one video in chunks; give one "
            "video, or use protocol=query_agnostic"
        )
    if prompt.question_text_before_cut:
        raise UnsupportedError(
            f"{prompt.identity} has {prompt.question_text_before_cut} tokens of text before its video, and the question of a "
            "stream comes behind it; put the text after the video, or use protocol=query_agnostic"
        )


def _without(prompt: EncodedPrompt, first: int, last: int) -> EncodedPrompt:
    """Return the prompt without tokens `first` to `last`."""

    def cut(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:, :first], tensor[:, last:]], 1)

    shape = prompt.input_ids.shape
    inputs = {name: cut(one) if one.shape == shape else one for name, one in prompt.inputs.items()}
    return replace(prompt, inputs=inputs, types=cut(prompt.types))


def _positions(model: Any, prompt: EncodedPrompt, video: bool) -> Tensor:
    if not video:
        return torch.arange(prompt.length, device=prompt.input_ids.device)[None]
    given = {name: prompt.inputs[name] for name in (GRID, "second_per_grid_ts") if name in prompt.inputs}
    positions: Tensor = model.model.get_rope_index(prompt.input_ids, mm_token_type_ids=prompt.types, **given)[0]
    return positions


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as ranges: `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@torch.no_grad()
def read(
    session: Session, reader: Reader, listener: StreamListener, meter: Meter, deadline: float | None = None
) -> tuple[CompressedCache, Tensor]:
    """Feed all chunks; return the cache and the logits `[V]` of the last token before the question.

    Args:
        session: open on the model; afterwards it observes nothing.

    Raises:
        GenerationTimeout, NonFiniteLogitsError.
    """
    prompt, length = reader.prompt, reader.length
    cache = CompressedCache.of([StreamLayer(listener.room) for _ in session.attentions])
    session.expect(listener, prompt.types[:, :length], prompt.identity)
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


def run_stream(
    session: Session,
    family: ModelFacts,
    rules: DecodeRules,
    tokenizer: Any,
    prompt: EncodedPrompt,
    cell: CellSpec,
    timeout_s: float | None = None,
    measured: str = "group",
) -> ForkResult:
    """Return one cell's result for one prompt; a fault becomes its status.

    Args:
        session: open on the model. measured: as rows say it; `own` under `sharing=off`, though a stream shares nothing.
    """
    device = next(session.model.parameters()).device
    meter = Meter(device)
    result = blank(cell, prompt, measured=measured, fork_batch=1, fork_rows=1)
    try:
        _stream(session, family, rules, tokenizer, prompt, cell, timeout_s, meter, result)
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
    room = reader.asked + max(*(clip.end - clip.start for clip in clips), slack(rules.max_new_tokens, lengths.fed))
    cap = None if cell.budget is None else cell.entries(lengths.reduced)
    listener = StreamListener(cell.compressor, cap, cell.seed, reader.frames, room, reader.asked, meter.phase)
    cache, logits = read(session, reader, listener, meter, deadline)
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
    (answer,) = decode(group, cache, 1, cell.protocol, deadline)
    result.decode_s = meter.now() - start
    if answer.error is not None:
        raise answer.error
    text = rules.text(answer.tokens, answer.finish, tokenizer)
    fill_answer(result, cell, lengths, answer.tokens, answer.finish, text)
    result.entries_end = sum(int(layer.entries().sum()) for layer in cache.layers)
    result.vision_s, result.compress_s = meter.seconds.get("vision"), meter.seconds.get("compress", 0.0)
    result.prefill_s = max(meter.seconds["prefill"] - result.compress_s, 0.0)
    result.tpot_s = result.decode_s / result.n_tokens

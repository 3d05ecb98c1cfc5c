"""One pass: a batch of prompts prefilled and compressed by one method, then so many tokens decoded, whatever they are.

A pass is timed or counts memory, never both: counting live storages on the host slows what it watches. Times come from marks in
the device's stream, which nothing waits for; every token is brought to the host, as a server does to hand it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from mmkv_bench import devices
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressing import Phases
from mmkv_bench.compression.decoding.rows import RowsLayer
from mmkv_bench.compression.fixed import fixed_view
from mmkv_bench.compression.session import attach
from mmkv_bench.devices import Bytes, Device, Mark
from mmkv_bench.efficiency.batch import COMMON, Filled, Lap, fill, likeliest
from mmkv_bench.generation.compiled import EAGER_DECODE
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import following
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.single import stays_eager
from mmkv_bench.generation.status import NonFiniteLogitsError
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

INSIDE = ("vision", "score", "select", "reduce")
"""Phases within the text model's forward pass over the prompt, or before it."""
OWN = "account"  # our own counting, in no time
ROW_BY_ROW = "row_by_row"  # the fallback of batches whose sequences have states of a decode policy


class Clock:
    """Phases between marks of a device's stream, read when all is done."""

    def __init__(self, device: Device):
        self.device = device
        self.intervals: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self.device.mark()
        try:
            yield
        finally:
            self.intervals.append((name, start, self.device.mark()))

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds of all its intervals together."""
        found: dict[str, float] = {}
        for name, start, end in self.intervals:
            found[name] = found.get(name, 0.0) + self.device.between(start, end)
        return found


@dataclass(frozen=True)
class Marks:
    """Places of one pass in the device's stream.

    Attributes:
        laps: of every prefill; ready: the batch is joined and counted; tokens: the first, second, ... of every sequence on
            the host. fed: the first ones came from a step of their own, behind `ready`.
        answers: the tokens of each sequence.
    """

    laps: list[Lap]
    ready: Mark
    tokens: list[Mark]
    fed: bool
    answers: list[list[int]]


@dataclass
class Held:
    """What the cache is before the first step [bytes], see the columns of `timings`; fallbacks of the method."""

    held: int
    useful: int
    read: int
    fallback: list[str]


@dataclass
class Timed:
    """Seconds by phase of a timed pass, and of each decode step; answers: the tokens of each sequence."""

    seconds: dict[str, float]
    steps: list[float]
    held: Held
    answers: list[list[int]]


@dataclass
class Counted:
    """Peak bytes by phase of a pass that counts memory."""

    peaks: dict[str, Bytes]
    resident: int | None
    held: Held


@dataclass
class Bench:
    """A model ready to be measured.

    Attributes:
        step: decodes one token in place of the model where no decode policy acts (`CompiledStep`); None: the model.
        together: the prompts of a batch are prefilled in one forward pass, not one by one.
    """

    loaded: LoadedModel
    new_tokens: int
    attention: str | None = None
    step: Callable[..., Any] | None = None
    together: bool = False
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        self.device = devices.at(self.loaded.device)

    def timed(self, prompts: Sequence[EncodedPrompt], cell: CellSpec) -> Timed:
        """Time one pass over a batch of prompts of one length. Raises whatever stops it: out of memory, NaN."""
        clock = Clock(self.device)
        marks, held = self._run(prompts, cell, clock, self.step)
        between, inside = self.device.between, clock.seconds()
        compressed = {name: inside.get(name, 0.0) for name in INSIDE if name != "vision" or name in inside}
        prefilled = sum(between(lap.start, lap.prefilled) for lap in marks.laps) - inside.get(OWN, 0.0)
        told = sum(between(lap.prefilled, lap.end) for lap in marks.laps)
        joined = {name: inside[name] for name in ("join",) if name in inside}
        joining, tokens = sum(joined.values()), marks.tokens
        if marks.fed:
            told += between(marks.ready, tokens[0])
        first = prefilled + told + (joining if marks.fed else 0.0)
        ends = [tokens[0] if marks.fed else marks.ready, *tokens[1:]]
        steps = [between(one, after) for one, after in pairwise(ends)]
        reached = first + (0.0 if marks.fed else joining)  # when the first step begins
        seconds = {
            "encode": sum(prompt.encode_s for prompt in prompts),
            "prefill": prefilled - sum(compressed.values()),
            "first_token": told,
            "ttft": first,
            "second_token": reached + steps[0],
            "total": reached + sum(steps),
            "decode": sum(steps),
        }
        return Timed(compressed | joined | seconds, steps, held, marks.answers)

    def counted(self, prompts: Sequence[EncodedPrompt], cell: CellSpec, limit: int | None = None) -> Counted:
        """Count what one pass holds at most, by phase. limit: bytes that it may hold, weights included. Raises as `timed`."""
        present = prompts if self.together else prompts[:1]  # at a time
        inputs = [one for prompt in present for one in prompt.inputs.values() if one.device == self.device.place]
        weights = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        with self.device.counted([*weights, *inputs], limit) as counters:
            meter = Meter(self.loaded.device, counters)
            with meter.phase("total"):
                _, held = self._run(prompts, cell, meter.phase, None)
        return Counted(meter.peaks, meter.peak_resident(), held)

    @torch.no_grad()
    def _run(
        self, prompts: Sequence[EncodedPrompt], cell: CellSpec, phases: Phases, step: Callable[..., Any] | None
    ) -> tuple[Marks, Held]:
        model, device = self.loaded.model, self.device
        lengths = lengths_of(protocol(cell.protocol), prompts[0], self.loaded.family)
        acting = stays_eager(cell.compressor, cell.evicts(lengths.reduced))
        joins = len(prompts) > 1 and not self.together
        device.synchronise()
        with attach(
            model,
            cell.compressor,
            cell.budget,
            cell.protocol,
            cell.seed,
            prompt_tokens=prompts[0].length,
            attention=self.attention,
            # What is joined gets its slots then; a policy's layer keeps those that it was made with.
            reserve=0 if joins and not acting else self.new_tokens - 1,
            phases=phases,
            packs=self.step is None or acting,
        ) as session:
            filled = fill(session, prompts, device, phases, together=self.together, tell=not lengths.fed)
            cache = filled.joined(self.new_tokens - 1 + lengths.forgotten, phases)
            held = self._held(cache, filled, lengths.fed, acting)
            ready, tokens, answers, offset = device.mark(), [], [], 1 - lengths.forgotten
            common, rows = {"past_key_values": cache, **COMMON}, len(prompts)
            if filled.first is None:
                fed = torch.cat([prompt.input_ids[:, lengths.candidates :] for prompt in prompts])
                lead = fed.to(device.place)
                with phases("first_token"):
                    at = following(filled.last, offset, lengths.fed, rows).contiguous()
                    chosen = likeliest(model(input_ids=lead, position_ids=at, **common))
                offset += lengths.fed
            else:
                chosen = filled.first
            tokens.append(device.mark())
            answers.append(chosen)
            if step is not None and not acting:
                common["past_key_values"] = fixed_view(cache)
            forward, output = model if step is None or acting else step, None
            with phases("decode"):
                for count in range(self.new_tokens - 1):
                    at = following(filled.last, offset + count, 1, rows).contiguous()
                    output = forward(input_ids=chosen, position_ids=at, **common)
                    chosen = likeliest(output)
                    tokens.append(device.mark())
                    answers.append(chosen)
            if output is not None and bool(output.logits.isnan().any()):
                raise NonFiniteLogitsError(f"NaN logits at new token {self.new_tokens}")
            return Marks(filled.laps, ready, tokens, bool(lengths.fed), torch.cat(answers, 1).tolist()), held

    def _held(self, cache: CompressedCache, filled: Filled, fed: int, acting: bool) -> Held:
        fallback = list(dict.fromkeys(filled.fallback))
        if self.step is not None and acting:
            fallback.append(EAGER_DECODE)
        if any(isinstance(layer, RowsLayer) for layer in cache.layers):
            fallback.append(ROW_BY_ROW)
        return Held(
            held=sum(tensor.nbytes for layer in cache.layers for tensor in layer.buffers()),
            useful=filled.useful,
            read=sum(layer.read_nbytes(fed) for layer in cache.layers),
            fallback=fallback,
        )

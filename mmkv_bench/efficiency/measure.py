"""One pass: a batch of prompts prefilled and compressed by one method, then so many tokens decoded, whatever they are.

A pass is timed or counts memory, never both: counting live storages on the host slows what it watches. Times come from marks in
the device's stream, which nothing waits for; every token is brought to the host, as a server does to hand it on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mmkv_bench import devices
from mmkv_bench.compression import states
from mmkv_bench.compression.batched_layer import BatchedLayer
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.fixed_layer import pool_of
from mmkv_bench.compression.listeners import Phases, untimed
from mmkv_bench.devices import Bytes, Device, Mark
from mmkv_bench.generation.batch import FilledBatch, PromptPlaceholders
from mmkv_bench.generation.decode import EAGER_DECODE
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.one_pass import Driver, Pass
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.single import stays_eager
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

INSIDE = ("vision", "score", "select", "reduce")
"""Phases within the text model's forward pass over the prompt, or before it."""
ACCOUNT = "account"  # counting of entries, in no time
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
        seconds: dict[str, float] = {}
        for name, start, end in self.intervals:
            seconds[name] = seconds.get(name, 0.0) + self.device.between(start, end)
        return seconds


@dataclass
class CacheBytes:
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
    held: CacheBytes
    answers: list[list[int]]


@dataclass
class MemoryPeaks:
    """Peak bytes by phase of a pass that counts memory."""

    peaks: dict[str, Bytes]
    resident: int | None
    held: CacheBytes


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
        prefilled = sum(between(lap.start, lap.prefilled) for lap in marks.laps) - inside.get(ACCOUNT, 0.0)
        first_token = sum(between(lap.prefilled, lap.end) for lap in marks.laps)
        joined = {name: inside[name] for name in ("join",) if name in inside}
        joining, tokens = sum(joined.values()), marks.tokens
        if marks.fed:
            first_token += between(marks.ready, tokens[0])
        first = prefilled + first_token + (joining if marks.fed else 0.0)
        ends = [tokens[0] if marks.fed else marks.ready, *tokens[1:]]
        steps = [between(one, after) for one, after in pairwise(ends)]
        reached = first + (0.0 if marks.fed else joining)  # when the first step begins
        seconds = {
            "encode": sum(prompt.encode_s for prompt in prompts),
            "prefill": prefilled - sum(compressed.values()),
            "first_token": first_token,
            "ttft": first,
            "second_token": reached + steps[0],
            "total": reached + sum(steps),
            "decode": sum(steps),
        }
        return Timed(compressed | joined | seconds, steps, held, marks.answers.tolist())

    def counted(
        self, prompts: Sequence[EncodedPrompt], cell: CellSpec, limit: int | None = None, distinct: int | None = None
    ) -> MemoryPeaks:
        """Count what one pass holds at most, by phase. limit: bytes that it may hold, weights included. distinct: so many prompts
        and the last are prefilled, the others are copies (see `batch.fill`); None: all are. Raises as `timed`.

        Of a compiled step the pass is one as they are timed, in which its caches' storages and graphs stand ready from the pass
        before. The host counts operations, which a compiled program has none of: there it does the step's arithmetic eagerly, on
        the same storages.
        """
        step, pool = self.step, pool_of(self.loaded.model)
        pool.clear()
        if step is not None and not stays_eager(cell.compressor, self._evicts(prompts, cell)):
            step = step if self.device.memory is not None else self.loaded.model
            self._run(prompts, cell, untimed, step, PromptPlaceholders(distinct) if distinct else None)
            gc.collect()  # what traced a step holds its cache
        present = prompts if self.together else prompts[:1]  # at a time
        inputs = [one for prompt in present for one in prompt.inputs.values() if one.device == self.device.place]
        weights = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        with self.device.counted([*weights, *inputs, *pool.tensors()], limit) as counters:
            meter = Meter(self.loaded.device, counters)
            with meter.phase("total"):
                _, held = self._run(
                    prompts, cell, meter.phase, step, PromptPlaceholders(distinct, counters.alike) if distinct else None
                )
        return MemoryPeaks(meter.peaks, meter.peak_resident(), held)

    def _evicts(self, prompts: Sequence[EncodedPrompt], cell: CellSpec) -> bool:
        return cell.evicts(lengths_of(protocol(cell.protocol), prompts[0], self.loaded.family).reduced)

    def _run(
        self,
        prompts: Sequence[EncodedPrompt],
        cell: CellSpec,
        phases: Phases,
        step: Callable[..., Any] | None,
        copies: PromptPlaceholders | None = None,
    ) -> tuple[Pass, CacheBytes]:
        lengths = lengths_of(protocol(cell.protocol), prompts[0], self.loaded.family)
        driver = Driver(
            self.loaded.model,
            self.new_tokens,
            attention=self.attention,
            step=step,
            packs=self.step is None,
            together=self.together,
            copies=copies,
        )
        held: list[CacheBytes] = []

        def counted(cache: CompressedCache, filled: FilledBatch) -> None:
            held.append(self._held(cache, filled, lengths.fed, driver.acts(cell, lengths)))

        self.device.synchronise()
        return driver.run(prompts, cell, lengths, self.device, phases, counted), held[0]

    def _held(self, cache: CompressedCache, filled: FilledBatch, fed: int, acting: bool) -> CacheBytes:
        fallback = list(dict.fromkeys(filled.fallback))
        if self.step is not None and acting:
            fallback.append(EAGER_DECODE)
        if any(isinstance(layer, BatchedLayer) for layer in cache.compressed):
            fallback.append(ROW_BY_ROW)
        beside = states.nbytes([*cache.states.values()])  # a decode step reads windows and states whole
        return CacheBytes(
            held=sum(tensor.nbytes for layer in cache.compressed for tensor in layer.buffers()) + beside,
            useful=filled.useful + beside,
            read=sum(layer.read_nbytes(fed) for layer in cache.compressed) + beside,
            fallback=fallback,
        )

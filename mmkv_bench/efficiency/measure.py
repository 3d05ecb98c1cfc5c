"""One pass: a batch of prompts is prefilled and compressed by one method, then a fixed number of tokens is decoded.

A pass either measures times or counts memory, because counting live storages on the host slows the pass. Times come
from marks (events) in the device's stream, so the host never waits for the device. Every token is copied to the host,
as a server does.
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
from mmkv_bench.generation.unshared_generation import stays_eager
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

INNER_PHASES = ("vision", "score", "select", "reduce")
"""Phases before the text model's forward pass over the prompt, or during it."""
ACCOUNT = "account"  # counting of entries, excluded from times
ROW_BY_ROW = "row_by_row"  # fallback: the batch's sequences have states of a decode policy


class Clock:
    """Times the phases of a pass by marks in a device's stream (CUDA events)."""

    def __init__(self, device: Device):
        self.device = device
        self.intervals: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_mark = self.device.mark()
        try:
            yield
        finally:
            self.intervals.append((name, start_mark, self.device.mark()))

    def seconds(self) -> dict[str, float]:
        """Map each phase to the total seconds of its intervals. Call this after the pass."""
        seconds: dict[str, float] = {}
        for name, start, end in self.intervals:
            seconds[name] = seconds.get(name, 0.0) + self.device.between(start, end)
        return seconds


@dataclass
class CacheBytes:
    """Bytes of the compressed caches before the first decode step (columns of `timings`), and fallbacks."""

    held: int
    useful: int
    read: int
    fallback: list[str]


@dataclass
class PassTimes:
    """Times of one pass: seconds per phase and per decode step. answers: the generated token ids of each sequence."""

    seconds: dict[str, float]
    steps: list[float]
    held: CacheBytes
    answers: list[list[int]]


@dataclass
class MemoryPeaks:
    """Memory of one pass: peak bytes on the device by phase, and peak resident bytes of the process."""

    peaks: dict[str, Bytes]
    resident: int | None
    held: CacheBytes


@dataclass
class Bench:
    """A model that is ready to be measured, with its device and settings.

    Attributes:
        step: function that decodes one token if no decode policy acts (`CompiledStep`); None: the model itself.
        together: whether the prompts of a batch are prefilled in one forward pass rather than one by one.
    """

    loaded: LoadedModel
    new_tokens: int
    attention: str | None = None
    step: Callable[..., Any] | None = None
    together: bool = False
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        self.device = devices.at(self.loaded.device)

    def measure_times(self, prompts: Sequence[EncodedPrompt], cell: CellSpec) -> PassTimes:
        """Time one pass: prefill the prompts, compress by the cell's method, decode. Failures (out of memory, NaN) are
        raised.

        prompts: the batch, all of equal length.
        """
        clock = Clock(self.device)
        pass_marks, cache_bytes = self._run(prompts, cell, clock, self.step)
        seconds_between, inner_seconds = self.device.between, clock.seconds()
        compressed = {
            name: inner_seconds.get(name, 0.0) for name in INNER_PHASES if name != "vision" or name in inner_seconds
        }
        prefill_seconds = sum(seconds_between(lap.start, lap.prefilled) for lap in pass_marks.laps) - inner_seconds.get(
            ACCOUNT, 0.0
        )
        first_token = sum(seconds_between(lap.prefilled, lap.end) for lap in pass_marks.laps)
        join_seconds_by_name = {name: inner_seconds[name] for name in ("join",) if name in inner_seconds}
        join_seconds, marks_of_tokens = sum(join_seconds_by_name.values()), pass_marks.tokens
        if pass_marks.fed:
            first_token += seconds_between(pass_marks.ready, marks_of_tokens[0])
        seconds_to_first_token = prefill_seconds + first_token + (join_seconds if pass_marks.fed else 0.0)
        token_marks = [marks_of_tokens[0] if pass_marks.fed else pass_marks.ready, *marks_of_tokens[1:]]
        step_seconds = [seconds_between(one, after) for one, after in pairwise(token_marks)]
        seconds_until_decoding = seconds_to_first_token + (0.0 if pass_marks.fed else join_seconds)
        seconds = {
            "encode": sum(prompt.encode_s for prompt in prompts),
            "prefill": prefill_seconds - sum(compressed.values()),
            "first_token": first_token,
            "ttft": seconds_to_first_token,
            "second_token": seconds_until_decoding + step_seconds[0],
            "total": seconds_until_decoding + sum(step_seconds),
            "decode": sum(step_seconds),
        }
        return PassTimes(
            compressed | join_seconds_by_name | seconds, step_seconds, cache_bytes, pass_marks.answers.tolist()
        )

    def measure_memory(
        self, prompts: Sequence[EncodedPrompt], cell: CellSpec, limit: int | None = None, distinct: int | None = None
    ) -> MemoryPeaks:
        """Run one pass and count its peak memory by phase. Any failure is raised.

        With a compiled step, an uncounted pass runs first, so that caches and graphs exist as in timed passes. On the
        host, a compiled program would hide its operations from the counter, so the step then runs eagerly on the same
        storages.

        Args:
            prompts: the batch, all of equal length.
            limit: maximum bytes of the pass, weights included.
            distinct: number of prompts that are prefilled besides the last; the others are copies (see `batch.fill`).
                None prefills all.
        """
        step, storage_pool = self.step, pool_of(self.loaded.model)
        storage_pool.clear()
        if step is not None and not stays_eager(cell.compressor, self._evicts(prompts, cell)):
            step = step if self.device.memory is not None else self.loaded.model
            self._run(prompts, cell, untimed, step, PromptPlaceholders(distinct) if distinct else None)
            gc.collect()  # the objects that traced a step hold its cache
        prompts_on_device = prompts if self.together else prompts[:1]  # at a time
        inputs = [
            one for prompt in prompts_on_device for one in prompt.inputs.values() if one.device == self.device.place
        ]
        weights = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        with self.device.counted([*weights, *inputs, *storage_pool.tensors()], limit) as counters:
            meter = Meter(self.loaded.device, counters)
            with meter.phase("total"):
                _, cache_bytes = self._run(
                    prompts, cell, meter.phase, step, PromptPlaceholders(distinct, counters.alike) if distinct else None
                )
        return MemoryPeaks(meter.peaks, meter.peak_resident(), cache_bytes)

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
        cache_bytes: list[CacheBytes] = []

        def counted(cache: CompressedCache, filled: FilledBatch) -> None:
            cache_bytes.append(self._held(cache, filled, lengths.fed, driver.acts(cell, lengths)))

        self.device.synchronise()
        return driver.run(prompts, cell, lengths, self.device, phases, counted), cache_bytes[0]

    def _held(self, cache: CompressedCache, filled: FilledBatch, fed: int, acting: bool) -> CacheBytes:
        fallbacks = list(dict.fromkeys(filled.fallback))
        if self.step is not None and acting:
            fallbacks.append(EAGER_DECODE)
        if any(isinstance(layer, BatchedLayer) for layer in cache.compressed):
            fallbacks.append(ROW_BY_ROW)
        state_bytes = states.nbytes([*cache.states.values()])  # a decode step reads all windows and states
        return CacheBytes(
            held=sum(tensor.nbytes for layer in cache.compressed for tensor in layer.buffers()) + state_bytes,
            useful=filled.useful + state_bytes,
            read=sum(layer.read_nbytes(fed) for layer in cache.compressed) + state_bytes,
            fallback=fallbacks,
        )

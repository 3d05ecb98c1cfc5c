"""One pass: a prompt prefilled and compressed by one method, then so many tokens decoded, whatever they are.

A pass is timed or counts memory, never both: counting live storages on the host slows what it watches. Times come from marks in
the device's stream, which nothing waits for; every token is brought to the host, as a server does to hand it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from mmkv_bench import devices
from mmkv_bench.compression.compressing import Compressing, Phases
from mmkv_bench.compression.fixed import fixed_view
from mmkv_bench.compression.session import attach
from mmkv_bench.devices import Bytes, Device, Mark
from mmkv_bench.generation.compiled import EAGER_DECODE
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.meter import Meter, vision_clock
from mmkv_bench.generation.prefill import following, last_positions
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.single import stays_eager
from mmkv_bench.generation.status import NonFiniteLogitsError
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

INSIDE = ("vision", "score", "select", "reduce")
"""Phases within the text model's forward pass over the prompt, or before it."""
OWN = "account"  # our own counting, in no time


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
        start: before the prompt; prefilled: behind the text model and all compression; tokens: each on the host.
        answer: the tokens.
    """

    start: Mark
    prefilled: Mark
    tokens: list[Mark]
    answer: list[int]


@dataclass
class Held:
    """What the cache is before the first step [bytes], see the columns of `timings`; fallbacks of the method."""

    held: int
    useful: int
    read: int
    fallback: list[str]


@dataclass
class Timed:
    """Seconds by phase of a timed pass, and of each decode step; answer: the tokens, as they reached the host."""

    seconds: dict[str, float]
    steps: list[float]
    held: Held
    answer: list[int]


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
    """

    loaded: LoadedModel
    new_tokens: int
    attention: str | None = None
    step: Callable[..., Any] | None = None
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        self.device = devices.at(self.loaded.device)

    def timed(self, prompt: EncodedPrompt, cell: CellSpec) -> Timed:
        """Time one pass. Raises whatever stops it: out of memory, NaN."""
        clock = Clock(self.device)
        marks, held = self._run(prompt, cell, clock, self.step)
        between, inside = self.device.between, clock.seconds()
        own, ends = inside.get(OWN, 0.0), marks.tokens
        compressed = {name: inside.get(name, 0.0) for name in INSIDE if name != "vision" or name in inside}
        seconds = compressed | {
            "encode": prompt.encode_s,
            "prefill": between(marks.start, marks.prefilled) - own - sum(compressed.values()),
            "first_token": between(marks.prefilled, ends[0]),
            "ttft": between(marks.start, ends[0]) - own,
            "second_token": between(marks.start, ends[1]) - own,
            "total": between(marks.start, ends[-1]) - own,
            "decode": between(ends[0], ends[-1]),
        }
        steps = [between(one, after) for one, after in pairwise(ends)]
        return Timed(seconds, steps, held, marks.answer)

    def counted(self, prompt: EncodedPrompt, cell: CellSpec) -> Counted:
        """Count what one pass holds at most, by phase. Raises as `timed`."""
        weights = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        with self.device.counted([*weights, *prompt.inputs.values()]) as counters:
            meter = Meter(self.loaded.device, counters)
            with meter.phase("total"):
                _, held = self._run(prompt, cell, meter.phase, None)
        return Counted(meter.peaks, meter.peak_resident(), held)

    @torch.no_grad()
    def _run(
        self, prompt: EncodedPrompt, cell: CellSpec, phases: Phases, step: Callable[..., Any] | None
    ) -> tuple[Marks, Held]:
        model, device = self.loaded.model, self.device
        lengths = lengths_of(protocol(cell.protocol), prompt, self.loaded.family)
        acting = stays_eager(cell.compressor, cell.evicts(lengths.reduced))
        prefilled: list[Mark] = []
        device.synchronise()
        with attach(
            model,
            cell.compressor,
            cell.budget,
            cell.protocol,
            cell.seed,
            prompt_tokens=prompt.length,
            identity=prompt.identity,
            token_types=prompt.types,
            attention=self.attention,
            reserve=self.new_tokens - 1,
            phases=phases,
            packs=self.step is None or acting,
        ) as session:
            # The session's own hook, which compresses, is older and runs first.
            hook = session.text.register_forward_hook(lambda *_: prefilled.append(device.mark()))
            common = {
                "past_key_values": session.new_cache(),
                "use_cache": True,
                "logits_to_keep": 1,
                "return_dict": True,
            }
            try:
                start = device.mark()
                with phases("prefill"), vision_clock(model, phases):
                    output = model(**prompt.inputs, **common)
            finally:
                hook.remove()
            last = last_positions(session.position_ids, prompt.length, self.loaded.device)
            tokens: list[Mark] = []
            answer: list[int] = []
            offset = 1 - lengths.forgotten
            with phases("first_token"):
                if lengths.fed:
                    lead = prompt.input_ids[:, lengths.candidates :]
                    output = model(
                        input_ids=lead, position_ids=following(last, offset, lengths.fed, 1).contiguous(), **common
                    )
                    offset += lengths.fed
                chosen = _chosen(output, answer)
                tokens.append(device.mark())
            if step is not None and not acting:
                common["past_key_values"] = fixed_view(session.filled)
            forward = model if step is None or acting else step
            with phases("decode"):
                for count in range(self.new_tokens - 1):
                    at = following(last, offset + count, 1, 1).contiguous()
                    output = forward(input_ids=chosen, position_ids=at, **common)
                    chosen = _chosen(output, answer)
                    tokens.append(device.mark())
            if bool(output.logits.isnan().any()):
                raise NonFiniteLogitsError(f"NaN logits at new token {self.new_tokens}")
            made = session.listener
            assert isinstance(made, Compressing), "the session of `attach`"
            return Marks(start, prefilled[0], tokens, answer), self._held(made, acting)

    def _held(self, made: Compressing, acting: bool) -> Held:
        layers = [rows[0] for rows in made.accounts.values()]
        fallback = list(dict.fromkeys([*made.fallbacks[0], *made.observed[0]]))
        if self.step is not None and acting:
            fallback.append(EAGER_DECODE)
        return Held(
            held=sum(layer.held for layer in layers),
            useful=sum(layer.useful for layer in layers),
            read=sum(layer.read for layer in layers),
            fallback=fallback,
        )


def _chosen(output: Any, answer: list[int]) -> torch.Tensor:
    """The likeliest next token, int64 `[1, 1]`, once it is known on the host, where it goes to `answer`."""
    chosen: torch.Tensor = output.logits[:, -1].argmax(-1)[:, None]
    answer += chosen[:, 0].tolist()
    return chosen

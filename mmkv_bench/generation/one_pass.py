"""One pass of a batch through one method: prompts are prefilled and compressed, then a fixed number of tokens is decoded.

`efficiency/measure.py` runs a pass on a real device, `dry_run.py` on a simulated one. The phases are `prefill` with the inner
phases `vision`, `score`, `select` and `reduce`, then `join`, `first_token` and `decode`. Memory peaks of `prefill` exclude those
of the inner phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.fixed_layer import fixed_view, pool_of
from mmkv_bench.compression.listeners import Phases
from mmkv_bench.compression.positions import positions_after
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.devices import Bytes, Counters, Mark
from mmkv_bench.generation.batch import (
    COMMON,
    FilledBatch,
    PassDevice,
    PrefillTimer,
    PromptPlaceholders,
    fill,
    likeliest,
)
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.result import CellSpec, NonFiniteLogitsError
from mmkv_bench.generation.unshared_generation import stays_eager
from mmkv_bench.protocols import DEFAULT, Lengths
from mmkv_bench.protocols import protocol as protocol_named


@dataclass(frozen=True)
class Pass:
    """Result of a pass, with time marks of the device.

    Attributes:
        session: the closed session, with the compressed cache after the last step.
        laps: marks of every prefill.
        ready: mark after the batch is joined and counted.
        tokens: for each decoded position, a mark after the tokens of all sequences are on the host.
        fed: whether the first answer tokens came from a separate step after `ready`.
        answers: answer tokens, int64 `[B, new]`.
    """

    session: Session
    laps: list[PrefillTimer]
    ready: Mark
    tokens: list[Mark]
    fed: bool
    answers: Tensor


@dataclass(frozen=True)
class Driver:
    """Runs passes of a model with the same settings.

    Attributes:
        new_tokens: tokens of every answer.
        reserve: spare slots for the answer; None: as many as the answer needs.
        step: `CompiledStep` that decodes in place of the model if no decode policy acts; None: the model decodes.
        packs: see `Session`.
        together, copies: see `batch.fill`.
    """

    model: PreTrainedModel
    new_tokens: int
    reserve: int | None = None
    attention: str | None = None
    step: Callable[..., Any] | None = None
    packs: bool = True
    together: bool = False
    copies: PromptPlaceholders | None = None

    def acts(self, cell: CellSpec, lengths: Lengths) -> bool:
        """Tell whether a decode policy changes the cell's cache while decoding. Its steps then cannot be compiled."""
        return stays_eager(cell.compressor, cell.evicts(lengths.reduced))

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[EncodedPrompt],
        cell: CellSpec,
        lengths: Lengths,
        device: PassDevice,
        phases: Phases,
        counted: Callable[[CompressedCache, FilledBatch], None] = lambda cache, filled: None,
    ) -> Pass:
        """Prefill, compress and decode a batch of prompts once.

        Args:
            prompts: prompts of one length.
            cell: method, budget and protocol.
            lengths: each prompt's lengths under the cell's protocol.
            counted: function that is called with the cache before the first step, outside of all phases.

        Raises:
            NonFiniteLogitsError: NaN among the logits of a token. Raised after the last step.
        """
        acting = self.acts(cell, lengths)
        reserve = self.new_tokens - 1 if self.reserve is None else self.reserve
        joins_caches = len(prompts) > 1 and not self.together
        with attach(
            self.model,
            cell.compressor,
            cell.budget,
            cell.protocol,
            cell.seed,
            prompt_tokens=prompts[0].length,
            attention=self.attention,
            # Joined caches get their slots when they are joined; a policy's layer keeps the slots it was made with.
            reserve=0 if joins_caches and not acting else reserve,
            phases=phases,
            replay=prompts[0].words,
            packs=self.packs or acting,
        ) as session:
            filled = fill(
                session,
                prompts,
                device,
                phases,
                together=self.together,
                first=not lengths.fed,
                candidates=lengths.candidates,
                copies=self.copies,
            )
            cache = filled.joined(reserve + lengths.forgotten, phases)
            step = None if acting else self.step
            if step is not None:
                with phases("join"):
                    cache = fixed_view(cache, pool_of(self.model), rounded=False)
            counted(cache, filled)
            ready, offset = device.mark(), 1 - lengths.forgotten
            if filled.first is None:
                lead = torch.cat([prompt.input_ids[:, lengths.candidates :] for prompt in prompts]).to(device.place)
                with phases("first_token"):
                    filled.first = self._next(self.model, cache, filled, lead, offset)
                offset += lengths.fed
            tokens, answers = [device.mark()], [filled.first]
            with phases("decode"):
                for count in range(self.new_tokens - 1):
                    answers.append(self._next(step or self.model, cache, filled, answers[-1], offset + count))
                    tokens.append(device.mark())
            _refuse_broken(filled.broken, self.new_tokens)
            return Pass(session, filled.laps, ready, tokens, bool(lengths.fed), torch.cat(answers, 1))

    @staticmethod
    def _next(
        forward: Callable[..., Any], cache: CompressedCache, filled: FilledBatch, fed: Tensor, offset: int
    ) -> Tensor:
        """Feed tokens int64 `[B, n]` and return the likeliest next tokens, int64 `[B, 1]`.

        forward: the model or the compiled step. offset: distance of the first fed token from the prompt's last token.
        """
        positions = positions_after(filled.last, offset, fed.shape[1], fed.shape[0]).contiguous()
        return likeliest(forward(input_ids=fed, position_ids=positions, past_key_values=cache, **COMMON), filled.broken)


def _refuse_broken(broken: Sequence[Tensor], new_tokens: int) -> None:
    if bool(torch.stack(list(broken)).any()):
        raise NonFiniteLogitsError(f"NaN among the logits of the answer's {new_tokens} tokens")


LOAD, VISION, PREFILL, SCORE, SELECT, REDUCE, FIRST, DECODE = PHASES = (
    "load",
    "vision",
    "prefill",
    "score",
    "select",
    "reduce",
    "first_token",
    "decode",
)
"""Phases in their order, as in the table `timings`. `load` covers only weights and prompt inputs."""


class Peaks:
    """Peak bytes of each phase of a pass. Memory counts for the innermost phase only."""

    def __init__(self, counters: Counters):
        self.counters = counters
        self.of: dict[str, Bytes] = {}
        self._open = [LOAD]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the `with` block's memory for this phase, or for the surrounding phase if `name` is not in `PHASES`."""
        if name not in PHASES:
            yield
            return
        self._close()
        self._open.append(name)
        try:
            yield
        finally:
            self._close()
            self._open.pop()

    def _close(self) -> None:
        peak, name = self.counters.peak(), self._open[-1]
        if name not in self.of:
            self.of[name] = peak
        elif name != LOAD:  # what runs between phases belongs to none
            self.of[name] = peak.larger(self.of[name])
        self.counters.restart()


class _Unclocked:
    """A device without time marks."""

    def __init__(self, place: torch.device):
        self.place = place

    def mark(self) -> None:
        """Mark nothing."""


def run(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    compressor: Compressor,
    budget: Budget | None,
    peaks: Peaks,
    *,
    types: Tensor,
    steps: int = 2,
    reserve: int = 32,
    seed: int = 0,
) -> Session:
    """Prefill, compress and decode one prompt, and record the peak memory of each phase in `peaks`.

    Args:
        inputs: the prompt as arguments of the model's forward, with `position_ids` for models that compute these from token
            values.
        types: int `[1, T]` (0 text, 1 image, 2 video).
        steps: decode steps after the first token.
        reserve: spare slots for the answer's tokens, see `compression.session.Session`.

    Returns:
        The closed session, with the compressed cache after the last step.
    """
    prompt = EncodedPrompt("phases", dict(inputs), types)
    lengths = protocol_named(DEFAULT).lengths(prompt.length, None)
    cell = CellSpec("phases", compressor, budget, DEFAULT, seed)
    driver = Driver(model, steps + 1, reserve)
    return driver.run([prompt], cell, lengths, _Unclocked(prompt.input_ids.device), peaks.phase).session

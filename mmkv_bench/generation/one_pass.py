"""One pass of a batch through one method: prompts prefilled and compressed, then so many tokens decoded, whatever they are.

The same code on a device that is timed or counted (`efficiency/measure.py`), and on one that only counts (`dry_run.py`). Phases
are told as they begin and end: `prefill`, within it `vision`, `score`, `select`, `reduce`; then `join`, `first_token`, `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv_bench.compression.compressing import Phases
from mmkv_bench.compression.fixed import fixed_view
from mmkv_bench.compression.fixed_pool import pool_of
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.generation.batch import COMMON, Copies, Filled, Lap, Place, fill, likeliest
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.prefill import following
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.single import stays_eager
from mmkv_bench.generation.status import NonFiniteLogitsError
from mmkv_bench.protocols import Lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmkv_bench.compression.cache import CompressedCache
    from mmkv_bench.devices import Mark


@dataclass(frozen=True)
class Pass:
    """What a pass was, and its places in the device's stream.

    Attributes:
        session: closed; its cache is the compressed one after the last step.
        laps: of every prefill; ready: the batch is joined and counted; tokens: the first, second, ... of every sequence on
            the host. fed: the first ones came from a step of their own, behind `ready`.
        answers: int64 `[B, new]`.
    """

    session: Session
    laps: list[Lap]
    ready: Mark
    tokens: list[Mark]
    fed: bool
    answers: Tensor


@dataclass(frozen=True)
class Driver:
    """A model, and how its passes are made.

    Attributes:
        new_tokens: of every answer; reserve: slots for them, as many as they need when None.
        step: decodes one token in place of the model where no decode policy acts (`CompiledStep`); None: the model.
        packs: see `Session`. together: the prompts of a batch are prefilled in one forward pass, not one by one. copies: see
            `batch.fill`.
    """

    model: PreTrainedModel
    new_tokens: int
    reserve: int | None = None
    attention: str | None = None
    step: Callable[..., Any] | None = None
    packs: bool = True
    together: bool = False
    copies: Copies | None = None

    def acts(self, cell: CellSpec, lengths: Lengths) -> bool:
        """A decode policy acts on the cell's cache, so that its steps stay eager."""
        return stays_eager(cell.compressor, cell.evicts(lengths.reduced))

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[EncodedPrompt],
        cell: CellSpec,
        lengths: Lengths,
        device: Place,
        phases: Phases,
        counted: Callable[[CompressedCache, Filled], None] = lambda cache, filled: None,
    ) -> Pass:
        """One pass.

        Args:
            prompts: of one length; lengths: what the cell's protocol makes of each.
            counted: told about the cache before the first step, when what is done with it belongs to no phase.

        Raises:
            NonFiniteLogitsError: NaN among the logits of some token. Nothing waits for them: they are looked at on the device,
                and what was seen is read behind the last step.
        """
        acting = self.acts(cell, lengths)
        reserve = self.new_tokens - 1 if self.reserve is None else self.reserve
        joins = len(prompts) > 1 and not self.together
        with attach(
            self.model,
            cell.compressor,
            cell.budget,
            cell.protocol,
            cell.seed,
            prompt_tokens=prompts[0].length,
            attention=self.attention,
            # What is joined gets its slots then; a policy's layer keeps those that it was made with.
            reserve=0 if joins and not acting else reserve,
            phases=phases,
            packs=self.packs or acting,
        ) as session:
            filled = fill(
                session, prompts, device, phases, together=self.together, tell=not lengths.fed, copies=self.copies
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
    def _next(forward: Callable[..., Any], cache: CompressedCache, filled: Filled, fed: Tensor, offset: int) -> Tensor:
        """The likeliest tokens behind those that are fed, the first of which stand `offset` places behind their prompts."""
        at = following(filled.last, offset, fed.shape[1], fed.shape[0]).contiguous()
        return likeliest(forward(input_ids=fed, position_ids=at, past_key_values=cache, **COMMON), filled.broken)


def _refuse_broken(broken: Sequence[Tensor], new_tokens: int) -> None:
    """Raises NonFiniteLogitsError where some sequence had NaN logits at some token."""
    if bool(torch.stack(list(broken)).any()):
        raise NonFiniteLogitsError(f"NaN among the logits of the answer's {new_tokens} tokens")

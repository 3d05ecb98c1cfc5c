"""Build a batch of prefilled and compressed prompts.

- One prompt after the other: memory holds one full cache and the compressed caches, which are joined afterwards.
- All prompts in one forward pass: memory holds the activations and full entries of one layer for all prompts. If a method
  compares layers, it holds the full entries of all layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmkv_bench.compression.batched_layer import join
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.listeners import Phases, PrefillListener
from mmkv_bench.compression.positions import last_positions
from mmkv_bench.compression.session import Session
from mmkv_bench.devices import Mark
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.meter import vision_clock
from mmkv_bench.generation.prefill import feed

COMMON = {"use_cache": True, "logits_to_keep": 1, "return_dict": True}
"""Arguments of every forward pass of a measured run."""


class PassDevice(Protocol):
    """The device on which a batch is computed: place of the tensors, and time marks."""

    @property
    def place(self) -> torch.device: ...

    def mark(self) -> Mark: ...


@dataclass(frozen=True)
class PrefillTimer:
    """Time marks of one prefill.

    Attributes:
        start: before the forward pass.
        prefilled: after the text model and all compression.
        end: after the first answer tokens are on the host, if they come from the prefill.
    """

    start: Mark
    prefilled: Mark
    end: Mark


@dataclass
class FilledBatch:
    """A batch of prefilled and compressed prompts.

    Attributes:
        caches: one per sequence, or one for all.
        last: position ids of the prompts' last tokens, `[..., B, 1]`.
        first: int64 `[B, 1]`, the first answer tokens; None if these are decoded from the reduced cache (`strict`).
        useful: bytes of keys and values, without padding, that the first decode step reads.
        fallback: the method's fallbacks.
        broken: one bool scalar on the device per call of `likeliest`: whether the logits contained NaN.
    """

    caches: list[CompressedCache] = field(default_factory=list)
    laps: list[PrefillTimer] = field(default_factory=list)
    last: Tensor = field(init=False)
    first: Tensor | None = None
    useful: int = 0
    fallback: list[str] = field(default_factory=list)
    broken: list[Tensor] = field(default_factory=list)

    def add(self, cache: CompressedCache, listener: PrefillListener) -> None:
        """Add a cache of one prompt (or of all prompts) that `listener` has just compressed."""
        self.caches.append(cache)
        self.useful += sum(row.useful for layer in listener.accounts.values() for row in layer)
        self.fallback += [name for names in (*listener.fallbacks, *listener.observed) for name in names]

    def joined(self, reserve: int, phases: Phases) -> CompressedCache:
        """Return one cache with all sequences. Joining is the phase `join`. reserve: spare slots of a joined cache."""
        if len(self.caches) == 1:
            return self.caches[0]
        with phases("join"):
            return join(self.caches, reserve)


@dataclass(frozen=True)
class PromptPlaceholders:
    """Settings of a pass that only counts memory and replaces most prompts by copies.

    Only the first `distinct` prompts (at least two) and the last prompt are prefilled. The caches of other prompts are copies of
    the prefilled caches. The pass uses as many bytes as a real pass, except for padding if head lengths differ.

    Attributes:
        alike: function of two tensors that makes the memory counter count the second tensor if the first is counted.
    """

    distinct: int
    alike: Callable[[Tensor, Tensor], None] = lambda one, other: None

    def lay(self, prompt: EncodedPrompt, same: EncodedPrompt) -> None:
        """Make the memory counter count the tensors of `prompt` if those of `same`, a prompt of equal shape, are counted."""
        for name, tensor in {**same.inputs, "types": same.types}.items():
            self.alike(tensor, {**prompt.inputs, "types": prompt.types}[name])


@torch.no_grad()
def fill(
    session: Session,
    prompts: Sequence[EncodedPrompt],
    device: PassDevice,
    phases: Phases,
    *,
    together: bool,
    first: bool,
    candidates: int,
    copies: PromptPlaceholders | None = None,
) -> FilledBatch:
    """Prefill and compress prompts of one length. The result of a prompt does not depend on the other prompts.

    Args:
        session: a session of `attach`, with spare slots for the answer if no caches are joined.
        prompts: each prompt is on the device during its prefill only.
        together: whether to prefill all prompts in one forward pass.
        first: whether to choose the first answer tokens from the prefill's logits.
        candidates: number of prompt tokens that are not fed again (`Lengths`).
        copies: copies in place of prefilled prompts, to count memory; None: prefill all prompts.

    Raises:
        UnsupportedError: `together` with prompts of different shapes.
    """
    filled = FilledBatch()
    positions_by_prompt: list[Tensor] = []
    tokens: list[Tensor] = []
    listener = session.listener
    assert isinstance(listener, PrefillListener), "the session of `attach`"
    ends: list[Mark] = []
    # The session's own hook, which compresses, is older and runs first.
    hook = session.text.register_forward_hook(lambda *_: ends.append(device.mark()))
    try:
        for number, group in enumerate([prompts] if together else [[prompt] for prompt in prompts]):
            if copies is not None and copies.distinct <= number < len(prompts) - 1:
                same = number % copies.distinct
                copies.lay(group[0], prompts[1])  # the first prompt's inputs are counted even if they are not read
                positions_by_prompt.append(positions_by_prompt[same])
                tokens += tokens[same : same + 1]
                filled.add(copy.deepcopy(filled.caches[same]), listener)
                continue
            inputs, types = _stack_prompts([prompt.to(device.place) for prompt in group])
            session.expect(listener, types, [prompt.identity for prompt in group])
            start = device.mark()
            with phases("prefill"), vision_clock(session.model, phases):
                output = feed(session, inputs, session.new_cache(), candidates)
            positions_by_prompt.append(last_positions(session.position_ids, group[0].length, device.place))
            with phases("first_token"):
                if first:
                    tokens.append(likeliest(output, filled.broken))
            del output, inputs
            filled.laps.append(PrefillTimer(start, ends[-1], device.mark()))
            filled.add(session.latest_cache, listener)
    finally:
        hook.remove()
        session.expect(None, None, prompts[0].identity)
    filled.last = torch.cat(positions_by_prompt, -2)
    filled.first = torch.cat(tokens) if first else None
    return filled


def likeliest(output: Any, broken: list[Tensor]) -> Tensor:
    """Return the likeliest next tokens, int64 `[B, 1]`, after the device has computed them.

    output: the model's output. broken: gets a bool scalar on the device, True if the logits contain NaN.
    """
    broken.append(output.logits.isnan().any())
    tokens: Tensor = output.logits[:, -1].argmax(-1)[:, None]
    tokens.tolist()
    return tokens


def _stack_prompts(prompts: Sequence[EncodedPrompt]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's inputs and the token types of prompts of one shape, one row per prompt."""
    if len(prompts) == 1:
        return prompts[0].inputs, prompts[0].types
    try:
        inputs = {name: torch.cat([prompt.inputs[name] for prompt in prompts]) for name in prompts[0].inputs}
        return inputs, torch.cat([prompt.types for prompt in prompts])
    except (KeyError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedError(
            f"batch_prefill=together needs prompts of one shape, but those of {prompts[0].identity} differ: "
            f"{error}; use batch_prefill=one_by_one"
        ) from error

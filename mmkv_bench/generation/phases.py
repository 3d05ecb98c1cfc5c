"""One prompt's way through one method, told apart by phase: encode (or vision), prefill, score, select and reduce, first token,
decode steps. The same code on a real device and on one that only counts (`dry_run.py`).

A method's own work happens inside the prefill, layer by layer: while a layer's attention function runs its statistics are
gathered and it is scored; layers are reduced as soon as the method allows. A phase within another one is its own: peaks of
`prefill` are those outside of `score` and `reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressing import Compressing
from mmkv_bench.compression.session import Session
from mmkv_bench.generation.meter import vision_clock
from mmkv_bench.protocols import DEFAULT
from mmkv_bench.protocols import protocol as protocol_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmkv_bench.compression.attention import Attention
    from mmkv_bench.compression.cache import CompressedLayer
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.prompt import Prompt
    from mmkv_bench.devices import Bytes, Counters

LOAD, VISION, PREFILL, SCORE, REDUCE, FIRST, DECODE = PHASES = (
    "load",
    "vision",
    "prefill",
    "score",
    "reduce",
    "first token",
    "decode",
)
"""In their order; `load`: the weights and the prompt's inputs alone."""


class Peaks:
    """The most bytes that were held during each phase; the innermost one counts."""

    def __init__(self, counters: Counters):
        self.counters = counters
        self.of: dict[str, Bytes] = {}
        self._open = [LOAD]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to it."""
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
        elif name != LOAD:  # what lies between phases is no phase
            self.of[name] = peak.larger(self.of[name])
        self.counters.restart()


class _Compressing(Compressing):
    """`Compressing` whose reduction is a phase of its own."""

    peaks: Peaks

    def _reduce(self, prompt: Prompt, layers: list[int]) -> None:
        with self.peaks.phase(REDUCE):
            super()._reduce(prompt, layers)


class _Session(Session):
    """`Session` whose look at a layer is a phase of its own."""

    peaks: Peaks

    def after_attention(self, module: Attention, query: Tensor, layer: CompressedLayer) -> None:
        with self.peaks.phase(SCORE):
            super().after_attention(module, query, layer)


@torch.no_grad()
def run(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    compressor: Compressor,
    budget: Budget | None,
    peaks: Peaks,
    *,
    types: Tensor | None = None,
    steps: int = 2,
    reserve: int = 32,
    seed: int = 0,
) -> Session:
    """Prefill one prompt, compress it and decode greedily, phase by phase.

    Args:
        inputs: what the model's forward takes of one prompt, `position_ids` where its own would read values.
        types: int `[1, T]` (0 text, 1 image, 2 video); steps: decode steps after the first token, whatever they say.
        reserve: slots for the answer's tokens, as `compression.session.Session` takes them.

    Returns:
        The session, closed; its cache is the compressed one after the last step.
    """
    listener = _Compressing(compressor, budget, protocol_named(DEFAULT), seed, None, None, None)
    session = _Session(model, listener, token_types=types, identity="phases", reserve=reserve)
    listener.peaks = session.peaks = peaks
    length = inputs["input_ids"].shape[1]
    with session, vision_clock(model, peaks.phase):
        with peaks.phase(PREFILL):
            output = model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True)
        cache, positions = session.cache, session.position_ids
        with peaks.phase(FIRST):
            token = _chosen(output)
            del output
        for step in range(steps):
            with peaks.phase(DECODE):
                token = _chosen(
                    model(
                        input_ids=token,
                        position_ids=_next(positions, length + step, token.device),
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                        return_dict=True,
                    )
                )
    return session


def _chosen(output: Any) -> Tensor:
    """int64 `[1, 1]`: the next token, from logits in float32 as `generate()` has them."""
    return output.logits[:, -1].float().argmax(-1, keepdim=True)


def _next(positions: Tensor | None, place: int, device: torch.device) -> Tensor:
    """Position ids of one token after those of the prompt (their values do not matter here, their shape does)."""
    rows = () if positions is None or positions.ndim == 2 else (positions.shape[0],)
    return torch.full((*rows, 1, 1), place, device=device)

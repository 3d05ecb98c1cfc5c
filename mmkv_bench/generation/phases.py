"""What one prompt's pass through one method (`one_pass.py`) holds at most, told apart by phase: on a real device, or on one that
only counts (`dry_run.py`).

A method's own work happens inside the prefill, layer by layer: while a layer's attention function runs its statistics are
gathered and it is scored; layers are reduced as soon as the method allows. A phase within another one is its own: peaks of
`prefill` are those outside of `vision`, `score`, `select` and `reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.one_pass import Driver
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.protocols import DEFAULT
from mmkv_bench.protocols import protocol as protocol_named

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.session import Session
    from mmkv_bench.devices import Bytes, Counters

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
"""In their order; `load`: the weights and the prompt's inputs alone. The others as in the table `timings`."""


class Peaks:
    """The most bytes that were held during each phase; the innermost one counts."""

    def __init__(self, counters: Counters):
        self.counters = counters
        self.of: dict[str, Bytes] = {}
        self._open = [LOAD]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to it; what is in no list here, our own counting, to the phase around it."""
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
        elif name != LOAD:  # what lies between phases is no phase
            self.of[name] = peak.larger(self.of[name])
        self.counters.restart()


class _Unclocked:
    """The device of a pass whose tensors are there already, and of which nobody wants the time."""

    def __init__(self, place: torch.device):
        self.place = place

    def mark(self) -> None:
        """Nowhere."""


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
    """The pass of a measured run over one prompt, told apart by phase.

    Args:
        inputs: what the model's forward takes of one prompt, `position_ids` where its own would read values.
        types: int `[1, T]` (0 text, 1 image, 2 video); steps: decode steps after the first token, whatever they say.
        reserve: slots for the answer's tokens, as `compression.session.Session` takes them.

    Returns:
        The session, closed; its cache is the compressed one after the last step.
    """
    prompt = EncodedPrompt("phases", dict(inputs), types)
    lengths = protocol_named(DEFAULT).lengths(prompt.length, None)
    cell = CellSpec("phases", compressor, budget, DEFAULT, seed)
    driver = Driver(model, steps + 1, reserve)
    return driver.run([prompt], cell, lengths, _Unclocked(prompt.input_ids.device), peaks.phase).session

"""A method that fails on purpose: at one sample, in the way that its configuration names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.generation.result import GenerationTimeout

MENDED: set[str] = set()
"""Faults that do not happen any more; a cell's identity does not cover it, as it does not cover what mends a machine."""


@dataclass(frozen=True)
class FailingScorer(Scorer):
    """Recency, but at samples whose identity ends with `victim` the `fault` happens: oom, nans, error, timeout or
    interrupt."""

    fault: str
    victim: str

    def key(self, budget: int, length: int) -> tuple:
        return self.fault, self.victim

    def score(self, obs, budget: int, seed: int):
        recency = torch.arange(obs.length, dtype=torch.float32).expand(obs.key.shape[0], -1)
        if self.fault in MENDED or not obs.identity.endswith(self.victim):
            return recency
        if self.fault == "oom":
            raise torch.OutOfMemoryError("out of memory, on purpose\nwith a second line")
        if self.fault == "timeout":
            raise GenerationTimeout("too slow, on purpose")
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault == "nans":
            return recency.masked_fill(recency == 7, float("nan"))
        raise RuntimeError("broken, on purpose")

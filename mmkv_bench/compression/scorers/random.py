"""A control that keeps entries at random."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class RandomScorer(Scorer):
    """A control with independent uniform scores per layer, KV head and token. No parameters.

    Scores are drawn on the CPU, seeded by (method, seed, sample, layer): equal on every device and whatever ran before,
    and shared by all budgets, so that a smaller budget keeps a subset of a larger one's entries. The selector protects
    the last token alone, or four sinks as well (``methods.random.sinks=4``).

    No paper is reproduced: with a seed, kvpress draws the same numbers in every layer, and it protects
    nothing; EffiVLM-Bench keeps 10 % recents.
    """

    stochastic = True
    comparable = False

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        draw = torch.rand(obs.key.shape[:2], generator=obs.generator("random", seed), dtype=torch.float32)
        return draw.to(obs.device)

"""Sharp heads: KV heads that look at few tokens leave entries to those that look at many."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.waterfill import water_fill
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class AttentionScorer(Scorer):
    """Scores an entry by the attention of the prompt's last `queries` queries."""

    queries: int = 16

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.queries)  # keys and values are always there, queries only on demand

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.queries,)

    def score(self, obs, budget: int, seed: int):
        return obs.window_mass(self.queries)  # float32 [KV heads, tokens]; every head's scores add up to 1


@dataclass(frozen=True)
class SharpHeads(Allocator):
    """Divides a layer's budget by how many tokens each head's scores are spread over, 1 / sum of squared scores."""

    least: float = 0.5  # of the budget, for every head

    def caps(self, scores, budget, layers, n_layers, context=None):
        return [self.divided(score, min(budget, score.shape[1])) for score in scores]

    def divided(self, score, budget: int):
        heads, tokens = score.shape
        own = int(self.least * budget)
        spread = 1 / score.double().square().sum(-1).clamp_min(1e-30)
        more = water_fill(spread.tolist(), (budget - own) * heads, cap=tokens - own)  # exactly so many in all
        return torch.tensor([own + entries for entries in more])  # int64 [KV heads]

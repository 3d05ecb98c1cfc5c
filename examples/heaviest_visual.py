"""Heaviest visual tokens go first, or random ones: what sinks among visual tokens are worth. All text stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class HeaviestVisualScorer(Scorer):
    """Scores a visual token by its attention, negative, or by chance where `by_chance`; text is above all of them."""

    by_chance: bool = False

    @property
    def stochastic(self) -> bool:
        return self.by_chance  # then every seed of the run is a cell

    @property
    def needs(self) -> Needs:
        return Needs(column_sums=not self.by_chance)

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.by_chance,)

    def score(self, obs, budget: int, seed: int):
        if self.by_chance:
            scores = torch.rand(obs.key.shape[:2], generator=obs.generator(seed)).to(obs.device)
        else:
            scores = -obs.column_sums  # [KV heads, tokens]: attention of all queries, added up
        return scores.masked_fill(obs.token_types.to(obs.device) == 0, 1.0 + obs.length)  # above every visual token

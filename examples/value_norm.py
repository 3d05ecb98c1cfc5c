"""Value norm: entries whose values are long."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class ValueNormScorer(Scorer):
    """Scores an entry by the norm of its value, to the power `power`."""

    power: float = 1.0

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.power,)  # equal keys share one score, whatever the budget

    def score(self, obs, budget: int, seed: int):
        return obs.value.float().norm(dim=-1) ** self.power  # [KV heads, tokens], higher = keep

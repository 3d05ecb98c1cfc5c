"""Skeleton: what stays in the cache, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.observation import Observation


@dataclass(frozen=True)
class SkeletonScorer(Scorer):
    """Scores an entry by the attention that the prompt's last `window` queries pay to it."""

    window: int = 16  # a parameter of yours: methods.<this file>.args.window=32

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.window)  # what a prefill gathers for you beyond keys and values

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.window,)  # all that a score depends on; the budget only if it does

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        # Also there: obs.key, obs.value [KV heads, tokens, D], obs.token_types (0 text, 1 image, 2 video), obs.layer.
        # Random numbers: torch.rand(..., generator=obs.generator(seed)), and `stochastic = True` in the class.
        return obs.window_mass(self.window)  # float32 [KV heads, tokens], finite, higher = keep

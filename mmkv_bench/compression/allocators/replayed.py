"""An allocator that repeats a division of the budget that was measured on another prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.waterfill import water_fill
from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation


@dataclass(frozen=True)
class Replayed(Allocator):
    """An allocator that gives every head the share of the budget that the head had on another prompt.

    The method's own allocator still computes summaries and a division, so that a timed pass takes as long. That
    division is discarded.

    Args:
        allocator: the method's allocator.
        kept: entries ``[layers][Hkv]`` that the heads kept of the other prompt.
        entries: C of the other prompt. Head h of layer l gets ``kept[l][h] / entries`` of this prompt's C, at most all
            candidates (the other heads get the excess). Shares are rounded by largest remainder; the model's total is
            the scaled total of ``kept``, rounded down.
    """

    allocator: Allocator
    kept: tuple[tuple[int, ...], ...]
    entries: int

    @property
    def scope(self) -> Literal["layer", "model"]:
        return self.allocator.scope

    @property
    def needs(self) -> Needs:
        return self.allocator.needs

    @property
    def needs_visual(self) -> bool:  # type: ignore[override]
        return self.allocator.needs_visual

    @property
    def exceeds(self) -> bool:
        return self.allocator.exceeds

    @property
    def falls_short(self) -> bool:
        return True

    @property
    def follows_prompt(self) -> bool:
        return False

    def summary_key(self, budget: int, length: int) -> Hashable | None:
        return self.allocator.summary_key(budget, length)

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor | None:
        return self.allocator.summary(obs, budget, seed)

    def method_version(self, method: Composed) -> int:
        return self.allocator.method_version(method)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        return self.allocator.fallbacks(budget, length, types)

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        self.allocator.caps(scores, budget, layers, n_layers, context)
        caps_by_layer = self.divide(budget, scores[0].shape[1])
        return [torch.tensor(caps_by_layer[layer], dtype=torch.int64) for layer in layers]

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        counts = self.divide(budget, candidates)
        return -(-sum(sum(counts[layer]) for layer in layers) // len(self.kept[0]))

    def divide(self, budget: int, candidates: int) -> list[list[int]]:
        """Return the number of entries of every head, ``[layers][Hkv]``, for C (``budget``) of n ``candidates``."""
        weights, heads = [count for layer in self.kept for count in layer], len(self.kept[0])
        scaled = int(Fraction(sum(weights) * budget, self.entries))
        counts = water_fill(weights, min(scaled, candidates * len(weights)), candidates)
        return [counts[start : start + heads] for start in range(0, len(counts), heads)]

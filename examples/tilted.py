"""Tilted: SnapKV's scores, more entries in early layers than in late ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.scorers.window import WindowScorer


class Scores(WindowScorer):
    """SnapKV's, as they are."""


@dataclass(frozen=True)
class TiltedAllocator(Allocator):
    """The first half of the layers gets a share `tilt` of the budget more, the second half as much less."""

    tilt: float = 0.5
    follows_prompt = False  # caps follow from lengths alone

    def cap(self, layer: int, budget: int, candidates: int, layers: int) -> int:
        more = int(self.tilt * max(0, min(budget, candidates - budget)))  # mirrored layers add up to twice the budget
        side = (2 * layer < layers - 1) - (2 * layer > layers - 1)
        return min(budget, candidates) + side * more

    def allowance(self, budget, candidates, layers, n_layers):
        return sum(self.cap(layer, budget, candidates, n_layers) for layer in layers)

    def caps(self, scores, budget, layers, n_layers, context=None):
        found = [self.cap(layer, budget, score.shape[1], n_layers) for layer, score in zip(layers, scores, strict=True)]
        return [torch.full((score.shape[0],), cap) for cap, score in zip(found, scores, strict=True)]

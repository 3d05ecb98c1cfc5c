"""Compressors for proofs: random scores, exact ragged budgets, a reducer that poisons what was evicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.keep_all import KeepAll
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.compression.session import Session


@dataclass(frozen=True)
class RandomScores(Scorer):
    """Uniform noise from the observation's own stream."""

    stochastic = True

    def key(self, budget: int, length: int) -> tuple:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        heads = obs.key.shape[0]
        return torch.rand(heads, obs.length, generator=obs.generator("proof", seed))


def split(total: int, parts: int, most: int, seed: int) -> Tensor:
    """`total` entries over `parts`, each between 0 and `most`, uneven, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.zeros(parts, dtype=torch.int64)
    weight = torch.rand(parts, generator=generator) ** 2 + 0.02
    for _ in range(total):
        weight = weight.masked_fill(share >= most, 0)
        share[torch.multinomial(weight, 1, generator=generator)] += 1
    return share


@dataclass(frozen=True)
class HeadRagged(Allocator):
    """Every layer gets budget * Hkv entries, divided unevenly among its heads; some heads may get none."""

    scope = "layer"

    def caps(self, scores, budget: int, layers, n_layers: int, context=None) -> list[Tensor]:
        made = []
        for layer, score in zip(layers, scores, strict=True):
            heads, n = score.shape
            made.append(split(min(budget, n) * heads, heads, n, layer))
        return made


@dataclass(frozen=True)
class LayerRagged(Allocator):
    """The model's entries divided unevenly among layers, evenly among the heads of a layer."""

    scope = "model"

    def caps(self, scores, budget: int, layers, n_layers: int, context=None) -> list[Tensor]:
        heads, n = scores[0].shape
        share = split(min(budget, n) * len(scores), len(scores), n, 5)
        return [torch.full((heads,), int(count), dtype=torch.int64) for count in share]


@dataclass(frozen=True)
class AllRagged(Allocator):
    """The model's entries divided unevenly among all its heads at once."""

    scope = "model"

    def caps(self, scores, budget: int, layers, n_layers: int, context=None) -> list[Tensor]:
        heads, n = scores[0].shape
        share = split(min(budget, n) * heads * len(scores), heads * len(scores), n, 9)
        return list(share.view(len(scores), heads))


@dataclass(frozen=True)
class PoisonEvicted(Reducer):
    """Evicts, then fills the evicted entries of the tensors it was given with NaN: who still reads them shows it."""

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept = Evict().reduce(key, value, index)
        evicted = torch.ones(key.shape[:2], dtype=torch.bool)
        for head, slots in enumerate(index):
            evicted[head, slots[slots >= 0]] = False
        assert evicted.any()
        for entries in (key, value):
            entries[evicted] = float("nan")
        return kept


BUDGETS = {"uniform": Uniform(), "head_ragged": HeadRagged(), "layer_ragged": LayerRagged(), "all_ragged": AllRagged()}


def compressor(kind: str = "uniform", scorer: Scorer | None = None, reducer: Reducer | None = None) -> Compressor:
    """Random scores unless told otherwise; only the last token is protected."""
    return Compressor(f"proof_{kind}", scorer or RandomScores(), BUDGETS[kind], TopK(recents=1), reducer or Evict())


def window(size: int = 4, kind: str = "uniform") -> Compressor:
    """SnapKV-like: scores that depend on queries, so that chunking and padding can go wrong."""
    return Compressor(
        f"window_{kind}", WindowScorer(size, pool=3), BUDGETS[kind], TopK(recents=1, window=size), Evict()
    )


def keep_all() -> Compressor:
    """Scores, "allocates" everything whatever the budget, and gathers it: eviction's whole path without eviction."""
    return Compressor("proof_keep_all", RandomScores(), KeepAll(), TopK(recents=1), Evict(), reading="released")


def budget(value: object) -> Budget:
    return Budget.parse(value)


def stored(session: Session) -> list[Tensor]:
    """Per layer int64 [B,Hkv]: real entries counted from the stored tensors and their positions."""
    counts = []
    for layer in session.cache.layers:
        assert layer.keys.shape[:3] == layer.values.shape[:3]
        if layer.positions is None:
            counts.append(torch.full(layer.keys.shape[:2], layer.keys.shape[2]))
        else:
            assert layer.positions.shape == layer.keys.shape[:3]
            counts.append((layer.positions >= 0).sum(-1))
    return counts

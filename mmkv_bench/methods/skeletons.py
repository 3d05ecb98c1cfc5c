"""Skeletons of a method's parts, from which `mmkv-bench new` writes one into a file of its own: see `method_file.write`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.holding import Holding
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.topk import TopK

if TYPE_CHECKING:
    from torch import Tensor


# ---- beside
class SkeletonWindowScorer(WindowScorer):
    """SnapKV's scores, unchanged. Every method file must define a scorer."""


# ---- scorer: what stays in the cache, and why.
@dataclass(frozen=True)
class SkeletonScorer(Scorer):
    """A scorer that ranks entries by the attention of the prompt's last `window` queries."""

    window: int = 16  # a parameter of yours: methods.<this file>.args.window=32

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.window)  # what a prefill gathers for you beyond keys and values

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.window,)  # all that a score depends on; the budget only if it does

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        # Also there: obs.key, obs.value [KV heads, tokens, D], obs.token_types (0 text, 1 image, 2 video), obs.layer.
        # Random numbers: torch.rand(..., generator=obs.generator(seed)), and `stochastic = True` in the class.
        # docs/observation.md lists all that `obs` offers.
        return obs.window_mass(self.window)  # float32 [KV heads, tokens], finite, higher = keep


# ---- allocator: which layers and KV heads get how much of the budget.
@dataclass(frozen=True)
class SkeletonAllocator(Allocator):
    """An allocator that divides a part of a layer's budget (`least`) equally among its KV heads, and the rest by the
    highest scores."""

    least: float = 0.5  # a parameter of yours: methods.<this file>.args.least=0.3

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        # One layer at a time. `scope = "model"` in the class gives all of them at once, and memory falls only then.
        return [self._heads(score, min(budget, score.shape[1])) for score in scores]

    def _heads(self, score: Tensor, budget: int) -> Tensor:
        """Return the number of entries of each head of one layer, int64 [KV heads] on the CPU, that add up to budget *
        KV heads."""
        import torch

        heads = score.shape[0]
        floor = int(self.least * budget)
        ranked = score.sort(dim=-1, descending=True, stable=True)
        ranked.values[:, :floor] = torch.inf
        best = ranked.values.flatten().sort(descending=True, stable=True).indices[: budget * heads]
        return torch.bincount(best.cpu() // score.shape[1], minlength=heads)


# ---- selector: what stays whatever its score.
@dataclass(frozen=True)
class SkeletonSelector(TopK):
    """A selector that keeps sinks, the last tokens and the first token after each image or video, then the highest
    scores."""

    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        protected_tokens = super().protected(
            length, budget, types
        )  # bool [tokens]; `sinks` and `recents` are TopK's parameters
        if types is not None:
            protected_tokens[1:] |= (types[1:] == 0) & (types[:-1] != 0)  # 0 text, 1 image, 2 video
        return protected_tokens  # where more is protected than a head may hold, the last of it stays

    # `select` turns scores and caps into indices: override it where "protected, then the highest" is not what you want.


# ---- reducer: what is left of evicted entries in those that stay.
@dataclass(frozen=True)
class SkeletonReducer(Evict):
    """A reducer that keeps the selected keys unchanged and mixes a share of the prompt's average value into each
    value."""

    share: float = 0.1  # a parameter of yours: methods.<this file>.args.share=0.2

    @property
    def merges(self) -> bool:
        return True  # evicted entries leave a trace

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept_key, kept_value = super().reduce(key, value, index, types)  # [KV heads, kept, D]; new tensors
        mean = value.float().mean(dim=1, keepdim=True)  # key and value are only read: other methods share them
        mixed = (1 - self.share) * kept_value.float() + self.share * mean
        padded = (index < 0).unsqueeze(-1)  # heads that keep fewer are padded on the left, with zeros
        return kept_key, mixed.masked_fill(padded, 0).to(value.dtype)


# ---- decoding: what goes while the answer grows.
@dataclass(frozen=True)
class SkeletonPolicy(Holding):
    """A decode policy that keeps every head's size: each new token evicts the oldest entry, not counting the `first`
    entries, which stay."""

    hold: Literal["ratio", "size"] = (
        "size"  # "ratio": heads grow with the answer, by the share of the prompt that they kept
    )
    first: int = 4  # a parameter of yours: methods.<this file>.args.first=8

    def slot(self, entries: int, start: int) -> int:
        # Which entry goes, 0 the oldest, entries - 1 the newest; `start` is how many the head held before the answer.
        return min(self.first, entries - 2)

    # Holding evicts by place. A policy that looks at attention, or stores entries otherwise, is a DecodePolicy with a layer
    # of its own: mmkv_bench/compression/decoding/heavy_hitters.py.

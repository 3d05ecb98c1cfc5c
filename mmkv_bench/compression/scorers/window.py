"""SnapKV: the attention of the prompt's last queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import is_half, rounded_window_mass, window_mass
from mmkv_bench.compression.observation import Needs, Observation, effective_window
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class WindowScorer(Scorer):
    """SnapKV (arXiv 2404.14469, section 4): attention of an observation window, smoothed along the prompt.

    The last w queries attend to all T keys (causal inside the window). The probabilities are averaged over the w rows
    and over the g query heads of a KV head, and pooled with stride 1 in the columns before the window. The selector
    keeps the window itself (``TopK(window=w)``), whose columns are not pooled.

    Args:
        window: w, the observation window [tokens]. The window that is used is ``min(w, max(1, C // 2), T)``; below w
            the row says ``window_reduced``.
        pool: odd kernel size k [tokens], 1 = none.
        pooling: "average": zero padding counts in the divisor, as ``avg_pool1d`` does by default in every released
            code, so that with k = 5 the outer columns are scaled by 0.6 and 0.8; "max": padding never wins.
        heads: "first": mean over the g query heads, then pooling; "last": every query head is pooled separately. The
            order matters for the maximum, and for rounded averages.
        score_rounding: "none": float32 throughout; "model": dot products, probabilities, means and pooled scores are
            rounded to the model's dtype, which makes many ties in half precision. Nothing changes in float32, and rows
            of float32 models do not include this parameter.

    Paper and code: the SnapKV paper tunes w and k per model; codes circulate with (8, 7, max), (32, 7, max; method
    ``adakv_official``) and (64, 5, average; ``snapkv_kvpress``). The defaults here are those that MM-ShiftKV (appendix
    F.1) states for its baseline. Its released code defaults to w = 1 instead, as ``reading=released`` does. All
    releases of the family round to the model's dtype (``score_rounding=model``) and leave equal scores to their topk;
    here the lower index stays.
    """

    window: int = 32
    pool: int = 5
    pooling: Literal["average", "max"] = "average"
    heads: Literal["first", "last"] = "first"
    score_rounding: Literal["none", "model"] = "none"

    later = ("score_rounding",)
    halves = ("score_rounding",)

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 1, "tokens", "window")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ConfigError(f"pool is {self.pool}; allowed: odd kernel sizes (1 = no pooling)")

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.window)

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        window = effective_window(self.window, budget, length)
        return (window, self.pool, self.pooling, self.heads, self.score_rounding)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        return ("window_reduced",) if effective_window(self.window, budget, length) < self.window else ()

    def window_effective(self, budget: int, length: int) -> int:
        return effective_window(self.window, budget, length)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        w = effective_window(self.window, budget, obs.length)
        if self.score_rounding == "model" and is_half(obs.key.dtype):
            return self._rounded_scores(obs, w)
        mass = obs.window_mass(w)
        prefix = mass[:, : obs.length - w]
        if self.pool == 1 or prefix.shape[1] == 0:
            return mass
        if self.heads == "last" and self.pooling == "max":
            smoothed = torch.stack([self._pool(one[:, : obs.length - w]) for one in self._member_mass(obs, w)]).mean(0)
        else:
            smoothed = self._pool(prefix)
        return torch.cat([smoothed, mass[:, obs.length - w :]], 1)

    def _rounded_scores(self, obs: Observation, w: int) -> Tensor:
        """Return the scores ``[Hkv, T]`` with every step rounded to the model's half precision."""
        tail, prefix = obs.tail(w), obs.length - w
        reach = obs.tail_reach(w)
        mass = obs.shared(("half_window", w), lambda: rounded_window_mass(tail, obs.key, obs.scaling, obs.sinks, reach))

        def grouped(heads: Tensor) -> Tensor:
            return heads.view(obs.key.shape[0], obs.groups, obs.length).mean(1)

        def pooled(heads: Tensor) -> Tensor:
            return torch.cat([self._pool(heads[:, :prefix]), heads[:, prefix:]], 1)

        if self.pool == 1 or prefix == 0:
            return grouped(mass)
        return grouped(pooled(mass)) if self.heads == "last" else pooled(grouped(mass))

    def _pool(self, mass: Tensor) -> Tensor:
        """Return scores ``[h, m]`` pooled along the tokens, in the same shape."""
        pool = torch.nn.functional.avg_pool1d if self.pooling == "average" else torch.nn.functional.max_pool1d
        return pool(mass, self.pool, stride=1, padding=self.pool // 2)

    @staticmethod
    def _member_mass(obs: Observation, w: int) -> Iterator[Tensor]:
        """Yield the window's attention mass ``[Hkv, T]`` of the first, the second, ... query head of every KV head."""
        tail = obs.tail(w)
        tail = tail.view(obs.key.shape[0], obs.groups, *tail.shape[1:])
        sinks = None if obs.sinks is None else obs.sinks.view(obs.key.shape[0], obs.groups)
        for member in range(obs.groups):
            member_sinks = None if sinks is None else sinks[:, member]
            yield window_mass(tail[:, member], obs.key, obs.scaling, member_sinks, obs.tail_reach(w))

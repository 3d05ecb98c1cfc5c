"""MadaKV: attention of a few proxy queries at the end of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_least
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class TailMassScorer(Scorer):
    """MadaKV (arXiv 2506.15724): ``psi(i)``, the attention that the last P prompt queries pay to key i.

    Causal softmax over all T keys, mean over the P queries and over the g query heads of a KV head. (The paper sums
    over queries; the constant factor changes neither ranks nor quotas.) Unlike SnapKV's window, these queries have no
    reserved part of the budget: their columns compete like all others.

    Args:
        proxies: P, last prompt queries whose attention is measured [tokens], ``min(P, T)`` of them; below P the row
            says ``window_reduced``.

    No code was found. Third-party notes on the paper leave open P (32 here) and query heads that share a KV head (mean
    here).
    """

    proxies: int = 32

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens", "proxies")

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.proxies)

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (min(self.proxies, length),)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        return ("window_reduced",) if length < self.proxies else ()

    def window_effective(self, budget: int, length: int) -> int:
        return min(self.proxies, length)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        return obs.window_mass(min(self.proxies, obs.length))

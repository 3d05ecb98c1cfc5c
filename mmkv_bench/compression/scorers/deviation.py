"""FlashCache: entries that a low-pass filter over the tokens cannot reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.dct import HighPass, high_pass
from mmkv_bench.compression.numerics.moments import unrotate
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import ConfigError


def cutoff(gamma: float, length: int) -> int:
    """Return omega, the first of the T bins that the filter drops: ``max(1, int(gamma * T))``, exact in decimal."""
    return max(1, int(Decimal(str(gamma)) * length))


def check_gamma(gamma: float) -> None:
    """Raise ConfigError for a cut-off ``gamma`` outside of [0, 1)."""
    if not 0 <= gamma < 1:
        raise ConfigError(
            f"gamma is {gamma}; allowed: a share of the T bins, 0 <= gamma < 1 (at 1 the base is the prompt itself and"
            " no token deviates from it)"
        )


def filter_needs(keys: str) -> Needs:
    return Needs(states=keys == "unrotated")


def high_pass_parts(obs: Observation, gamma: float, keys: str) -> tuple[HighPass, HighPass]:
    """Return what the low-pass filter leaves out of a layer's keys and of its values, shared by scorer and allocator.

    gamma, keys: parameters of ``DeviationScorer``.
    """
    omega = cutoff(gamma, obs.length)

    def of_keys() -> HighPass:
        return high_pass(obs.key if keys == "cached" else unrotate(obs.key, *obs.rotation), omega)

    return (
        obs.shared(("high_pass", keys, omega), of_keys),
        obs.shared(("high_pass", "values", omega), lambda: high_pass(obs.value, omega)),
    )


@dataclass(frozen=True)
class DeviationScorer(Scorer):
    """FlashCache's outlier recognition (paper section 3.2.1, equations 6 to 10): no query and no attention is used.

    Every channel of the layer's keys and values is a signal over the T tokens. Its smooth base is the part in the bins
    ``m < omega`` of an orthonormal DCT-II. A token's score is its distance from the base:
    ``Dev[n] = MSE(K[n], K_base[n]) + MSE(V[n], V_base[n])``, the means over channels. float32, one FFT forward and one
    back; extra memory O(T * D). Constant keys and values deviate by exactly 0 and rank by position.

    Args:
        gamma: cut-off as a share of the T bins, in [0, 1): ``omega = max(1, int(gamma * T))``, so that bin 0 (the mean)
            is always base.
        heads: "joint": the means run over the channels of all KV heads, so that all heads of a layer keep the same
            tokens; "per_head": over a head's own channels.
        keys: "cached": the keys as they are stored, rotated; "unrotated": with the rotation of their position undone
            (the layer's inputs and rotations are held until the layer is done: T * (E + 2D) numbers more).
        removal: which deviations leave the cache first, the paper's Figure 2: "smallest" is the method; "largest"
            removes outliers first; "random" removes any token with equal probability, in one draw for all heads if they
            are joint. For the figure's curves use ``dba=false``: otherwise the layers' budgets would follow their
            outliers, whatever is removed.

    No code was released. Open in the paper and chosen here: gamma of its main tables (0.2, the entry of its gamma
    ablation, Table 5, that equals the result with budget allocation in Table 7); joint or per head (joint); before or
    after rotation (after); sinks and recents (the last token alone, ``TopK(recents=1)``). Keys and values enter
    unweighted, as in equation 10, so the larger of the two decides, usually the keys.
    """

    gamma: float = 0.2
    heads: Literal["joint", "per_head"] = "joint"
    keys: Literal["cached", "unrotated"] = "cached"
    removal: Literal["smallest", "largest", "random"] = "smallest"

    later: ClassVar[tuple[str, ...]] = ("removal",)

    def __post_init__(self) -> None:
        check_words(self)
        check_gamma(self.gamma)

    streams = False

    @property
    def needs(self) -> Needs:
        return filter_needs(self.keys) if self.removal != "random" else Needs()

    @property
    def stochastic(self) -> bool:
        return self.removal == "random"

    @property
    def negative(self) -> bool:
        return self.removal == "largest"

    @property
    def comparable(self) -> bool:  # type: ignore[override]
        return self.removal != "random"

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (cutoff(self.gamma, length), self.heads, self.keys, self.removal)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        score = self._random_scores(obs, seed) if self.removal == "random" else self._deviation(obs)
        if self.removal == "largest":
            score = -score
        return score if self.heads == "per_head" else score.mean(0, keepdim=True).repeat(len(score), 1)

    def _deviation(self, obs: Observation) -> Tensor:
        keys, values = high_pass_parts(obs, self.gamma, self.keys)
        return keys.deviation + values.deviation

    def _random_scores(self, obs: Observation, seed: int) -> Tensor:
        """Return uniform random numbers ``[Hkv, T]``; the mean that `score` takes for joint heads is as fair."""
        draw = torch.rand(obs.key.shape[:2], generator=obs.generator("flashcache", seed), dtype=torch.float32)
        return draw.to(obs.device)

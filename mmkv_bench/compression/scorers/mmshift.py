"""MM-ShiftKV: votes of proxy queries that are spread as decoding queries will be."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal, get_args, get_type_hints

from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.statistics.proxies import group_mass, group_votes
from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmkv_bench.compression.observation import Observation


@dataclass(frozen=True)
class MMShiftScorer(Scorer):
    """MM-ShiftKV (sections 3.2.1 to 3.2.3, equations 4 to 11, algorithm 1): decode-aware importance from the prefill.

    Per layer, N hidden states ``h_i = mu + gamma * sigma * eps_i`` are drawn around the prompt's own statistics (eq. 5),
    projected by the layer's query projection and rotated at positions behind the prompt (eq. 6). Each attends to all T
    keys (eq. 7). The proxies form G groups of n = N / G consecutive ones; the attention mass of a group is the sum over
    its proxies (eq. 8), and every key in the smallest set that covers the fraction tau of it gets one vote (eq. 9).
    With a(q_last) the attention of the prompt's last query: ``S_t = votes_t + lam * a_t(q_last)`` (eq. 11). The selector
    keeps the last token and the C - 1 best others. Extra memory is O(T): groups are streamed.

    What the paper leaves open is settled so: mu and sigma are those of the query projection's input, that is AFTER the
    input norm, over all T tokens, elementwise, population std; proxies are not normalised again, which would cancel
    gamma; bias and query norm are the module's own; proxy i (from 0) stands i + 1 positions behind the last token, all
    mrope axes advanced together; eps is drawn once per (seed, sample, layer) and shared by heads and budgets.

    Args:
        samples: N, proxies per layer.
        groups: G; must divide N.
        gamma: variance expansion, a factor of the standard deviation.
        tau: fraction of a group's mass that its covering set reaches, in (0, 1].
        lam: weight of the last query's attention. Votes are integers and attention is below 1, so 1 breaks ties only.
        statistics: "elementwise" ``mu, sigma [E]``, or "scalar": one mean and one std of all T * E values.
        centring: "sample": mu of this prompt; "none": mu = 0 (paper, table 11). Its "global" needs other prompts.
        gqa: "probability": mean over a KV head's g query heads first, one vote per group; "vote": query heads vote
            apart, 0..g*G votes.
        offsets: "consecutive": 1, 2, ..., N; "tiled": G * (1, ..., n) in every group.
        anchor_in_groups: also add the last query's attention to every group's mass, then divide by 1 + n.
        cover: "left": the covering set; "right": one key fewer, none when one key alone covers it.
        drop_last_key: leave the last key out of the mass after the softmax, without renormalising.
        rounding: "none": float32 throughout; "model": probabilities, head means and group masses are rounded to the
            model's dtype, which makes many ties in bfloat16.

    Paper and code (the Qwen path of the release; ``reading=released``): scalar statistics, so that proxies are
    isotropic noise and the prompt enters through two numbers per layer; std * 10 hard-coded; tiled offsets
    (+32, ..., +512, the same 16 in every group); anchor inside the groups as well as at the end; right-sided cover;
    last key dropped; rounding in the model's dtype. Not reproduced: the global random stream, the unbiased std
    (relative difference below 1 / T E), cumulative sums in float32, an unstable sort. The release's LLaVA path
    (G = 16, n = 32, statistics of the last 512 tokens, layers 0 and 1 without proxies) does not run there and is not
    offered here.
    """

    samples: int = 512
    groups: int = 32
    gamma: float = 10.0
    tau: float = 0.95
    lam: float = 1.0
    statistics: Literal["elementwise", "scalar"] = "elementwise"
    centring: Literal["sample", "none"] = "sample"
    gqa: Literal["probability", "vote"] = "probability"
    offsets: Literal["consecutive", "tiled"] = "consecutive"
    anchor_in_groups: bool = False
    cover: Literal["left", "right"] = "left"
    drop_last_key: bool = False
    rounding: Literal["none", "model"] = "none"

    stochastic = True

    def __post_init__(self) -> None:
        if self.samples < 1 or self.groups < 1 or self.samples % self.groups:
            raise ConfigError(
                f"samples={self.samples} cannot be split into groups={self.groups} of equal size; allowed: samples that"
                " are a positive multiple of groups, such as samples=512 groups=32"
            )
        if not self.gamma >= 0:
            raise ConfigError(f"gamma is {self.gamma}; allowed: 0 or more")
        if not 0 < self.tau <= 1:
            raise ConfigError(f"tau is {self.tau}; allowed: a fraction of the attention mass, 0 < tau <= 1")
        if not self.lam >= 0:
            raise ConfigError(f"lambda is {self.lam}; allowed: 0 or more")
        hints = get_type_hints(type(self))
        for name in ("statistics", "centring", "gqa", "offsets", "cover", "rounding"):
            value, allowed = getattr(self, name), get_args(hints[name])
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; {nearest(str(value), allowed)}")

    @property
    def needs(self) -> Needs:
        scalar = self.statistics == "scalar"
        return Needs(tail_queries=1, hidden_moments=not scalar, hidden_scalars=scalar)

    def key(self, budget: int, length: int) -> tuple:
        return astuple(self)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        rounding = obs.key.dtype if self.rounding == "model" else None
        anchor = self._anchor(obs, rounding)
        votes = group_votes(
            obs.future_queries(self._states(obs, seed), self._offsets()),
            obs.key,
            obs.scaling,
            self.groups,
            self.tau,
            per_query_head=self.gqa == "vote",
            cover=self.cover,
            drop_last=self.drop_last_key,
            anchor=anchor if self.anchor_in_groups else None,
            rounding=rounding,
        )
        return votes + self.lam * anchor

    def _states(self, obs: Observation, seed: int) -> Tensor:
        """Proxy hidden states ``[N, E]`` float32."""
        import torch

        if self.statistics == "elementwise":
            mean, std = obs.hidden_mean, obs.hidden_std
        else:
            mean, std = obs.hidden_scalar_moments
        shape = (self.samples, obs.hidden_size)
        noise = torch.randn(shape, generator=obs.generator("mmshift", seed), dtype=torch.float32).to(obs.device)
        states = noise * (self.gamma * std)
        return states if self.centring == "none" else states + mean

    def _offsets(self) -> Tensor:
        """Positions of the N proxies behind the prompt's last token, int64 ``[N]``."""
        import torch

        if self.offsets == "consecutive":
            return torch.arange(1, self.samples + 1)
        return (torch.arange(1, self.samples // self.groups + 1) * self.groups).repeat(self.groups)

    @staticmethod
    def _anchor(obs: Observation, rounding: torch.dtype | None) -> Tensor:
        """Attention of the prompt's last query, ``[Hkv, T]`` float32."""
        if rounding is None:
            return obs.last_attention()
        return next(group_mass(obs.tail(1), obs.key, obs.scaling, 1, rounding=rounding))[:, 0, 0]

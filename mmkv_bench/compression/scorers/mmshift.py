"""MM-ShiftKV: votes of proxy queries that are spread as decoding queries will be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from mmkv_bench.compression.context import Composed
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.moments import ROWS, ElementMoments
from mmkv_bench.compression.numerics.ordering import break_ties
from mmkv_bench.compression.numerics.proxies import group_mass, group_votes, total_mass
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import CalibrationError, ConfigError, UnsupportedError

COPIES = 16
"""Proxies of a layer without sampling: copies of the prompt's last hidden state, in one group (release, LLaVA)."""


@dataclass(frozen=True)
class MMShiftScorer(Scorer):
    """MM-ShiftKV (sections 3.2.1 to 3.2.3, equations 4 to 11, algorithm 1): decode-aware importance from the prefill.

    Per layer, N hidden states ``h_i = mu + gamma * sigma * eps_i`` are drawn around the prompt's own statistics (eq.
    5), projected by the layer's query projection and rotated at positions after the prompt (eq. 6). Each of these
    proxies attends to all T keys (eq. 7). They form G groups of n = N / G consecutive ones. The attention mass of a
    group is the sum over its proxies (eq. 8), and every key in the smallest set that covers the fraction tau of it gets
    one vote (eq. 9). With a(q_last) the attention of the prompt's last query: ``S_t = votes_t + lam * a_t(q_last)``
    (eq. 11).

    The selector keeps the last token and the C - 1 best others: by S_t in float64, equal scores by the larger anchor
    a_t (with lam above 0), then by the lower index. At 8 to 32 votes the steps of float32 (1e-6) are larger than most
    anchors, and even those of float64 are larger than the smallest. Extra memory is O(T): groups are streamed.

    Open in the paper and chosen here: mu and sigma are those of the query projection's input, AFTER the input norm,
    over all T tokens, elementwise, population std; proxies are not normalised again, which would cancel gamma; bias and
    query norm are the module's own; proxy i (from 0) is i + 1 positions after the last token, all mrope axes advanced
    together; eps is drawn once per (seed, sample, layer) and shared by heads and budgets; what replaces the votes in
    table 5; whether table 13 also splits the keys; which ratio table 10 takes for a layer.

    Args:
        samples: N, proxy queries per layer (table 8).
        groups: G, voting groups; must divide N.
        gamma: variance expansion, a factor of the standard deviation (table 6; 1 = none).
        tau: fraction of a group's mass that its covering set reaches, above 0 and below 1 (table 7). In floating point
            it is undefined where all of a mass is reached, so 1 is refused.
        lam: weight of the last query's attention (table 12). Votes are integers and attention is below 1, so 1 breaks
            ties only; with 0 ties go to the lower index.
        statistics: "elementwise" ``mu, sigma [E]``, or "scalar": one mean and one std of all T * E values.
        centring: mu is "sample": this prompt's; "none": 0; "global": the mean over other prompts, from ``calibration``
            (table 11).
        gqa: "probability": mean over a KV head's g query heads first, one vote per group; "vote": query heads vote
            separately, 0..g*G votes.
        offsets: "consecutive": 1, 2, ..., N; "tiled": G * (1, ..., n) in every group.
        anchor_in_groups: also add the last query's attention to every group's mass, then divide by 1 + n.
        cover: "left": the covering set; "right": one key fewer, none when one key alone covers it.
        drop_last_key: leave the last key out of the mass after the softmax, without renormalising.
        rounding: "none": float32 throughout; "model": probabilities, head means and group masses are rounded to the
            model's dtype, which makes many ties in bfloat16, and votes and anchor are added in float32.
        voting: "groups", or "none": the mass itself, summed over all N proxies, replaces the votes; tau and cover are
            not read (table 5: ``voting=none gamma=1`` is its row "+ Samp.", ``voting=none`` "+ Var. Exp.", and the
            method ``last_query`` LastAttn).
        modality: tokens whose statistics mu and sigma are (table 13): "unified" all, "vision" the visual ones, "text"
            the others, "separate": groups 0, 2, 4, ... draw around the visual tokens' statistics and the others around
            the text's. All T keys are used in every case. If there is no token of the requested kind, all tokens are
            used (fallback ``single_modality``); "vision" refuses prompts without visual tokens.
        expansion: "global": gamma in all layers; "layer": a factor per layer (table 10).
        layer_gamma: the factors of ``expansion=layer``, one per layer; empty takes those of ``calibration``.
        last_tokens: number of last tokens that mu and sigma are computed over, 0 = all T.
        plain_layers: number of first layers that draw no proxies: there, 16 copies of the prompt's last hidden state,
            at positions 1 to 16 after it, form one group.
        calibration: data for ``centring=global`` and ``expansion=layer``: ``mean`` (per layer E floats) and ``gamma``
            (a float per layer: std of decoded tokens over that of the prompt's). Made by
            ``python -m mmkv_bench calibrate mmshift``. In a configuration: ``auto`` (the model's committed artefact)
            or a path.

    Paper and code (the Qwen path of the release; ``reading=released``): scalar statistics, so that proxies are
    isotropic noise and the prompt enters through two numbers per layer; std * 10 hard-coded; tiled offsets (+32, ...,
    +512, the same 16 in every group); anchor inside the groups as well as at the end; right-sided cover; last key
    dropped; ``rounding=model``. The release's LLaVA path has G = 16 groups of 32, statistics of the last 512 tokens,
    and two layers without proxies (method ``mmshift_llava``); as released it does not run. Not reproduced: the global
    random stream, the unbiased std (relative difference below 1 / T E), cumulative sums in float32, an unstable sort,
    and gamma = 1 in layers that a table shipped for a 28-layer model lacks.
    """

    samples: int = 512
    groups: int = 32
    gamma: float = 10.0
    tau: float = 0.95
    lam: float = 1.0
    statistics: Literal["elementwise", "scalar"] = "elementwise"
    centring: Literal["sample", "none", "global"] = "sample"
    gqa: Literal["probability", "vote"] = "probability"
    offsets: Literal["consecutive", "tiled"] = "consecutive"
    anchor_in_groups: bool = False
    cover: Literal["left", "right"] = "left"
    drop_last_key: bool = False
    rounding: Literal["none", "model"] = "none"
    voting: Literal["groups", "none"] = "groups"
    modality: Literal["unified", "vision", "text", "separate"] = "unified"
    expansion: Literal["global", "layer"] = "global"
    layer_gamma: Sequence[float] = ()
    last_tokens: int = 0
    plain_layers: int = 0
    calibration: Mapping[str, Any] | str | None = field(default=None, hash=False, repr=False)

    stochastic = True
    calibrated_by = "mmshift"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_gamma", tuple(self.layer_gamma))
        if self.samples < 1 or self.groups < 1 or self.samples % self.groups:
            raise ConfigError(
                f"samples={self.samples} cannot be split into groups={self.groups} of equal size; allowed: samples that"
                " are a positive multiple of groups, such as samples=512 groups=32"
            )
        for name, value in (("gamma", self.gamma), *(("layer_gamma", factor) for factor in self.layer_gamma)):
            if not value >= 0:
                raise ConfigError(f"{name} is {value}; allowed: 0 or more")
        if not 0 < self.tau < 1:
            raise ConfigError(
                f"tau is {self.tau}; allowed: a fraction of the attention mass, 0 < tau < 1 (floating-point sums "
                "cannot tell where all of the mass is reached); use 0.99 for nearly all"
            )
        if not self.lam >= 0:
            raise ConfigError(f"lambda is {self.lam}; allowed: 0 or more")
        check_least(self, 0, "", "last_tokens", "plain_layers")
        check_words(self)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.modality == "separate" and self.groups < 2:
            raise ConfigError("modality=separate gives each kind of token its own groups; allowed: groups=2 or more")
        if self.layer_gamma and self.expansion == "global":
            raise ConfigError(
                "layer_gamma has no effect with expansion=global; allowed: expansion=layer, or layer_gamma=[]"
            )
        unset = self.expansion == "layer" and not self.layer_gamma
        settings = [f"centring={self.centring}"] if self.centring == "global" else []
        settings += ["expansion=layer without layer_gamma"] if unset else []
        if settings and self.calibration is None:
            raise ConfigError(
                f"{' and '.join(settings)} needs statistics of other prompts; make them with `python -m mmkv_bench "
                "calibrate mmshift` and give calibration=auto or the file's path"
            )

    @staticmethod
    def needs_calibration(parameters: Mapping[str, Any]) -> bool:
        """Tell whether a scorer with these parameters reads statistics of other prompts."""
        layerwise = parameters.get("expansion") == "layer" and not parameters.get("layer_gamma")
        return parameters.get("centring") == "global" or layerwise

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.modality == "unified"

    @property
    def needs_visual(self) -> bool:
        return self.modality == "vision"

    @property
    def needs(self) -> Needs:
        needs_states = self.modality != "unified" or self.last_tokens > 0
        scalar = self.statistics == "scalar"
        return Needs(
            tail_queries=1,
            hidden_moments=not needs_states and not scalar,
            hidden_scalars=not needs_states and scalar,
            states=needs_states or self.plain_layers > 0,
        )

    @cached_property
    def _calibration_hash(self) -> str:
        text = "" if self.calibration is None else json.dumps(self.calibration, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        parameters = (getattr(self, item.name) for item in fields(self) if item.name != "calibration")
        return (*parameters, self._calibration_hash)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        if self.modality == "unified" or types is None:
            return ()
        visual = types[-self.last_tokens :] > 0
        no_text = self.modality != "vision" and bool(visual.all())
        no_vision = self.modality != "text" and not bool(visual.any())
        return ("single_modality",) if no_text or no_vision else ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        rounding = obs.key.dtype if self.rounding == "model" else None
        anchor = self._anchor(obs, rounding)
        if obs.layer < self.plain_layers:
            groups, offsets = 1, torch.arange(1, COPIES + 1)
            states = obs.states[-1:].expand(COPIES, -1)
        else:
            groups, offsets = self.groups, self._offsets()
            states = self._states(obs, seed)
        adjust = {
            "per_query_head": self.gqa == "vote",
            "drop_last": self.drop_last_key,
            "anchor": anchor if self.anchor_in_groups else None,
            "rounding": rounding,
            "sinks": obs.sinks,
        }
        queries = obs.future_queries(states, offsets)
        if self.voting == "none":
            votes = total_mass(queries, obs.key, obs.scaling, groups, **adjust)
        else:
            votes = group_votes(queries, obs.key, obs.scaling, groups, self.tau, cover=self.cover, **adjust)
        if not self._breaks_ties:
            return votes + self.lam * anchor
        return break_ties(votes.double() + self.lam * anchor.double(), anchor)

    @property
    def _breaks_ties(self) -> bool:
        return self.lam > 0 and self.rounding == "none"

    def method_version(self, method: Composed) -> int:
        """Return 2 if the anchor breaks ties in float64, else 1: float32 was too coarse for some anchors."""
        return 2 if self._breaks_ties else 1

    def _states(self, obs: Observation, seed: int) -> Tensor:
        """Return the proxies' hidden states ``[N, E]`` float32."""
        mean, std = self._moments(obs)
        shape = (self.samples, obs.hidden_size)
        noise = torch.randn(shape, generator=obs.generator("mmshift", seed), dtype=torch.float32).to(obs.device)
        states = noise * (self._gamma(obs) * std)
        if self.centring == "none":
            return states
        return states + (self._global_mean(obs) if self.centring == "global" else mean)

    def _moments(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return mu and sigma of the prompt's hidden states, from which proxies are drawn: float32 ``[]`` or ``[E]``.

        If groups draw from different tokens, there is one row per proxy: ``[N, 1 or E]``.
        """
        if self.modality == "unified" and not self.last_tokens:
            return (obs.hidden_mean, obs.hidden_std) if self.statistics == "elementwise" else obs.hidden_scalar_moments
        if self.modality == "unified":
            return self._moments_of(obs, None)
        if obs.token_types is None:
            raise UnsupportedError(
                f"modality={self.modality} needs the types of the tokens, but this prompt has none; allowed: "
                "modality=unified"
            )
        visual = (obs.token_types > 0).to(obs.device)
        if self.modality == "vision" and not bool(visual.any()):
            raise UnsupportedError(
                "modality=vision takes its statistics from visual tokens, but this prompt has none; allowed: "
                "prompts with images or videos, or modality=unified"
            )
        if self.modality != "separate":
            return self._moments_of(obs, visual if self.modality == "vision" else ~visual)
        visual_moments, text_moments = self._moments_of(obs, visual), self._moments_of(obs, ~visual)
        group = torch.arange(self.samples, device=obs.device) // (self.samples // self.groups)
        is_even_group = (group % 2 == 0).unsqueeze(-1)
        mean, std = (torch.where(is_even_group, a, b) for a, b in zip(visual_moments, text_moments, strict=True))
        return mean, std

    def _moments_of(self, obs: Observation, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation over the ``chosen`` among the ``last_tokens``, or over all of these.

        chosen: bool ``[T]``; all count if None, or if none of the ``last_tokens`` is chosen.
        """
        first_token = obs.length - min(self.last_tokens or obs.length, obs.length)
        states = obs.states[first_token:]
        chosen = None if chosen is None or not bool(chosen[first_token:].any()) else chosen[first_token:]
        moments = ElementMoments()
        for start in range(0, len(states), ROWS):
            block = states[start : start + ROWS]
            moments.add(block if chosen is None else block[chosen[start : start + ROWS]])
        mean, std = (moments.mean(), moments.std()) if self.statistics == "elementwise" else moments.scalars()
        return mean.float(), std.float()

    def check_layers(self, layers: int) -> None:
        if self.layer_gamma:
            self._check_factor_count(self.layer_gamma, layers)

    def _gamma(self, obs: Observation) -> float:
        if self.expansion == "global":
            return self.gamma
        factors = self.layer_gamma or self._calibration_values("gamma")
        self._check_factor_count(factors, obs.layers)
        return factors[obs.layer]

    @staticmethod
    def _check_factor_count(factors: Sequence[float], layers: int) -> None:
        if len(factors) != layers:
            raise ConfigError(
                f"layer_gamma has {len(factors)} factors, but the model has {layers} layers; allowed: one factor "
                "per layer"
            )

    def _global_mean(self, obs: Observation) -> Tensor:
        means = self._calibration_values("mean")
        if len(means) != obs.layers or len(means[obs.layer]) != obs.hidden_size:
            raise ConfigError(
                f"the calibrated means are for {len(means)} layers of {len(means[0])} features, but the model has "
                f"{obs.layers} of {obs.hidden_size}; calibrate this model"
            )
        mean = torch.tensor(means[obs.layer], dtype=torch.float32, device=obs.device)
        return mean if self.statistics == "elementwise" else mean.mean()

    def _calibration_values(self, name: str) -> Sequence[Any]:
        if not isinstance(self.calibration, Mapping):
            raise CalibrationError(
                f"calibration={self.calibration} was not loaded, because no model is known; make statistics of "
                "this model with python -m mmkv_bench calibrate mmshift"
            )
        return self.calibration[name]

    def _offsets(self) -> Tensor:
        """Return how many positions after the prompt's last token each of the N proxies is, int64 ``[N]``."""
        if self.offsets == "consecutive":
            return torch.arange(1, self.samples + 1)
        return (torch.arange(1, self.samples // self.groups + 1) * self.groups).repeat(self.groups)

    @staticmethod
    def _anchor(obs: Observation, rounding: torch.dtype | None) -> Tensor:
        """Return the attention of the prompt's last query, ``[Hkv, T]`` float32."""
        if rounding is None:
            return obs.last_attention()
        return next(group_mass(obs.tail(1), obs.key, obs.scaling, 1, rounding=rounding, sinks=obs.sinks))[:, 0, 0]

"""Scores of NVIDIA's kvpress (the optional package `kvpress`), with this package's budget and eviction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mmkv_bench import devices
from mmkv_bench.compression import presses
from mmkv_bench.compression.allocators.safeguard import Safeguard
from mmkv_bench.compression.context import Composed
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import ConfigError, UnsupportedError, first_line

_ARGS = "methods.kvpress.args"
_UNIFORM = {"_target_": "mmkv_bench.compression.allocators.uniform.Uniform"}
"""The allocator of `conf/method/kvpress.yaml`."""


@dataclass(frozen=True)
class PressScorer(Scorer):
    """The score of a press of kvpress, with this package's eviction under this package's budget.

    Supported are `ScorerPress` classes that override neither the library's hook nor `compress`, and two presses that
    mask by a score, `AdaKVPress` and `CriticalAdaKVPress`. All others are refused with the reason (`presses.py`).

    The press receives what its hook would get in a prefill (module, hidden states, keys, values, position embeddings).
    It evicts nothing: this package's allocator and selector choose the entries. For presses whose score depends on
    `compression_ratio`, it is set so that `int(T * (1 - ratio))` is C. The two masking presses divide C * Hkv among a
    layer's heads (`allocator`).

    Args:
        press: class name in `kvpress`, such as `KnormPress`.
        args: the press's constructor arguments except `compression_ratio`. A press inside a press is a class name, or
            `{press: <name>, <argument>: <value>}`, or `{press: <name>, args: {<argument>: <value>}}`.

    Fallback `press_reduced`: the entries with a press's highest score, which always stay (an observation window or
    sinks), are more than C. The library lets `topk` decide which of them stay, and may evict the prompt's last token.
    Here the last token and the latest of these entries stay, as with sinks and recents of this package's methods.

    Differences to a run of the library: scores are read as float32. Other ties go to the lower index (kvpress leaves
    them to `topk`). Random numbers are seeded per sample, layer and seed. Queries have the module's query norm in every
    family (kvpress knows Qwen3 and Gemma3 only). Positions after the prompt are the model's, also under mrope (kvpress
    counts 1-D positions).
    """

    press: str
    args: Mapping[str, Any] = field(default_factory=dict)

    needs = Needs(states=True)

    def __post_init__(self) -> None:
        library = presses.load()
        if not self.press:
            raise ConfigError(
                "method=kvpress needs a press; allowed: methods.kvpress.press=<name>, one of "
                f"{', '.join(presses.usable(library))}"
            )
        presses.build(library, self.press, self.args, _ARGS)

    @cached_property
    def _effective_args(self) -> str:
        """The effective arguments, as JSON."""
        return json.dumps(presses.effective(presses.load(), self.press, self.args), sort_keys=True)

    def __hash__(self) -> int:
        return hash((self.press, self._effective_args))

    @cached_property
    def stochastic(self) -> bool:
        """True if the press, or a press inside it, may draw random numbers (its module's source has `torch.rand`)."""
        library = presses.load()
        return presses.draws(library, presses.build(library, self.press, self.args, _ARGS))

    def method_version(self, method: Composed) -> int:
        """Return 2.

        Since version 2 the last of the protected entries stay if they exceed the budget, and the rows record the
        defaults of a press inside a press.
        """
        return 2

    @property
    def origin(self) -> dict[str, Any]:
        """Part of the identity of results: the library's version and all arguments of the press."""
        return {"args": json.loads(self._effective_args), "kvpress": presses.version()}

    @property
    def allocator(self) -> Safeguard | None:
        """The allocator of a press that masks; None for presses that only score."""
        return Safeguard(json.loads(self._effective_args)["alpha_safeguard"]) if self.press in presses.POOLED else None

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.press, self._effective_args, budget)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        library, press = presses.load(), self._build_press(obs, budget)
        scoring = press.press if self.press in presses.POOLED else press
        is_wrapped = len(presses.chain(library, scoring)) > 1
        score = self._ask(obs, scoring, seed) if is_wrapped else self._innermost_score(obs, budget, seed)
        if self.press == presses.CRITICAL_ADA and self.allocator is not None:
            score = _critical_ada(library, press, score, self.allocator, obs, budget)
        protected = self._always_kept(obs, budget, seed)
        exceeds_budget = protected.sum(-1, keepdim=True) > budget
        kept_protected = _latest_tokens(protected, budget)
        score = torch.where(exceeds_budget & kept_protected, score.amax(-1, keepdim=True), score)
        return torch.where(exceeds_budget & protected & ~kept_protected, score.amin(-1, keepdim=True), score)

    def observed_fallbacks(self, obs: Observation, budget: int, seed: int) -> tuple[str, ...]:
        exceeds_budget = self._always_kept(obs, budget, seed).sum(-1) > budget
        return ("press_reduced",) if bool(exceeds_budget.any()) else ()

    def _build_press(self, obs: Observation, budget: int) -> Any:
        press = presses.build(presses.load(), self.press, self.args, _ARGS)
        press.compression_ratio = 1 - (budget + 0.5) / obs.length
        return press

    def _always_kept(self, obs: Observation, budget: int, seed: int) -> Tensor:
        """Return the entries with the press's highest score, which it always keeps, bool ``[Hkv,T]``."""
        scores = self._innermost_score(obs, budget, seed)
        return scores == scores.amax(-1, keepdim=True)

    def _innermost_score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        """Return the score of the innermost press, which contains no other press: float32 ``[Hkv,T]``."""

        def ask() -> Tensor:
            return self._ask(obs, presses.chain(presses.load(), self._build_press(obs, budget))[-1], seed)

        return obs.memo(("kvpress", *self.key(budget, obs.length), seed), ask)

    def _ask(self, obs: Observation, press: Any, seed: int) -> Tensor:
        """Return the score that ``press`` gives for the observation, float32 ``[Hkv,T]``."""
        if obs.sinks is not None:
            raise UnsupportedError(
                f"kvpress' {self.press} does not support learned sinks, which this model's attention has; use a "
                "method of this package"
            )
        if obs.reach is not None:
            raise UnsupportedError(
                f"kvpress' {self.press} supports only causal attention, but this model's pictures attend to themselves in "
                "both directions; use a method of this package"
            )
        cos, sin = (part[None].to(obs.states.dtype) for part in obs.rotation)
        kwargs = {
            "hidden_states": obs.states[None],
            "position_embeddings": (cos, sin),
            "cache_position": torch.arange(obs.length, device=obs.device),
            "past_key_values": None,
        }
        try:
            with devices.at(obs.device).forked_random():
                torch.manual_seed(obs.generator("kvpress", seed).initial_seed() if self.stochastic else 0)
                score = press.score(_View(obs), obs.states[None], obs.key[None], obs.value[None], None, kwargs)
        except Exception as error:  # a press asserts what it supports, and may raise anything
            raise UnsupportedError(f"kvpress' {self.press} cannot score this prompt: {first_line(error)}") from error
        if score.shape != (1, *obs.key.shape[:2]):
            raise UnsupportedError(
                f"kvpress' {self.press} gave scores of shape {list(score.shape)}; allowed: {[1, *obs.key.shape[:2]]}"
            )
        return score[0].float()


def parts(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Build the parts of `method=kvpress`: the scorer, and the allocator of a press that divides the budget itself.

    Args:
        plain: the method's node with all values resolved.

    Raises:
        ConfigError: the press cannot be used, or it divides the budget and the configuration names another allocator.
    """
    scorer = PressScorer(plain["press"] or "", plain["args"] or {})
    safeguard, configured = scorer.allocator, dict(plain["allocator"] or {})
    if safeguard is None:
        return {"scorer": scorer}
    if configured != _UNIFORM:
        raise ConfigError(
            f"methods.kvpress.allocator={configured.get('_target_')} has no effect, because kvpress' "
            f"{scorer.press} divides the budget itself; leave the allocator at its default, or choose a press "
            "that only scores"
        )
    return {"scorer": scorer, "allocator": safeguard}


def _latest_tokens(protected: Tensor, budget: int) -> Tensor:
    """Return the last token and the latest ``protected`` ones, at most ``budget`` together: bool ``[Hkv,T]``."""
    latest_protected = protected.clone()
    latest_protected[:, -1] = True
    return latest_protected & (latest_protected.flip(-1).cumsum(-1).flip(-1) <= budget)


def _critical_ada(
    library: Any, press: Any, score: Tensor, allocator: Safeguard, obs: Observation, budget: int
) -> Tensor:
    """Return CriticalAdaKVPress's selection as a score ``[Hkv,T]`` in [0, 5], whose `C * Hkv` highest entries stay.

    A first part of each head's share (`allocator`) goes to the highest values of ``score``, the second part to the
    highest ``(score + epsilon) * mean over g of ||W_O v||_1``. Entries of the first part get 5, those of the second
    part 2 to 3, and all others 0 to 1, ordered by that product.
    """
    shares = allocator.layer(score, budget)[:, None]
    first_part = (shares * press.first_stage_ratio).long().clamp_min(allocator.floor(budget))
    norm = library.CriticalKVPress.vwl1norm(obs.value[None], _View(obs))[0].float()
    weighted = (score + press.epsilon) * norm
    in_first_part = _ranks(score) < first_part
    second_part = ~in_first_part & (_ranks(weighted.masked_fill(in_first_part, -torch.inf)) < shares - first_part)
    span = (weighted.amax() - weighted.amin()).clamp_min(torch.finfo(weighted.dtype).tiny)
    return torch.where(in_first_part, 5, (weighted - weighted.amin()) / span + 2 * second_part)


def _ranks(score: Tensor) -> Tensor:
    """Return the rank of each entry in its head, int64 ``[Hkv,T]``: 0 is the highest; equal scores by index."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(-1)


class _View:
    """The attention module as a press sees it: with `rotary_emb`, and with the module's norms in its projections.

    kvpress' own hook would attach `rotary_emb`. All other attributes are the module's.
    """

    def __init__(self, obs: Observation):
        self._obs = obs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._obs.module, name)

    @property
    def config(self) -> Any:
        return _Config(self._obs.module)

    def q_proj(self, hidden: Tensor) -> Tensor:
        """Project `[1,m,E]` -> `[1,m,Hq*D]`."""
        return self._obs.project(hidden[0]).transpose(0, 1).flatten(1)[None]

    def k_proj(self, hidden: Tensor) -> Tensor:
        """Project `[1,m,E]` -> `[1,m,Hkv*D]`."""
        module: Any = self._obs.module
        key, norm = module.k_proj(hidden), getattr(module, "k_norm", None)
        return key if norm is None else norm(key.unflatten(-1, (-1, module.head_dim))).flatten(-2)

    def rotary_emb(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin `[1,n,D]` in the dtype of `like` at positions `[1,n]`, counted from the prompt's start."""
        offsets = positions[0] - (self._obs.length - 1)
        if int(offsets.min()) < 1:
            raise UnsupportedError(
                "the press needs rotations inside the prompt, which mrope does not number along one axis"
            )
        cos, sin = self._obs.rope(offsets)
        return cos[None].to(like.dtype), sin[None].to(like.dtype)


class _Config:
    """The text model's configuration, with the `head_dim` that some families leave out but some presses read."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        config = self._module.config
        return getattr(config, name, self._module.head_dim) if name == "head_dim" else getattr(config, name)

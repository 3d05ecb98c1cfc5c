"""Scores of NVIDIA's kvpress (the optional package `kvpress`), with this package's eviction under this package's budget."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import ConfigError, UnsupportedError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.observation import Observation

CHECKED = ("0.4.3", "0.5.3", "0.5.5")
"""Versions whose presses were run beside the pinned torch and transformers."""
_INSTALL = f"pip install 'mmkv-bench[kvpress]' && pip install --no-deps kvpress=={CHECKED[-1]}"
_HINTS = {
    "AdaKVPress": "method=adakv evicts where this press only masks",
    "CriticalAdaKVPress": "method=adakv evicts where this press only masks",
    "PyramidKVPress": "method=pyramidkv divides the budget among layers",
    "ObservedAttentionPress": "it wants the whole T x T attention; method=h2o sums its columns in O(T) memory",
}
_OVERRIDES = {
    "__call__": "it drives the model itself, with passes or tables of its own",
    "forward_hook": "it has a hook of its own, which decodes, masks or composes",
    "compress": "it changes keys and values, or divides the budget, instead of scoring entries",
    "post_init_from_model": "it loads tables or weights for each model",
}
_RATIO = "compression_ratio"


@dataclass(frozen=True)
class PressScorer(Scorer):
    """The score of any press of kvpress that only scores: `ScorerPress` subclasses whose hook and `compress` are the
    library's common ones.

    The press is given what its hook would get in a prefill (module, hidden states, keys, values, position embeddings);
    it evicts nothing. Entries are then chosen by this package's allocator and selector and really evicted, with exact
    totals: `compression_ratio` is set so that `int(T * (1 - ratio))` is C, for presses whose score depends on it.

    Args:
        press: class name in `kvpress`, such as `KnormPress`.
        args: its constructor's arguments but `compression_ratio`. A press inside a press is a class name, or
            `{press: <name>, <argument>: <value>}`.

    Where this is not the library's own run: scores are read as float32, ties go to the lower index (kvpress leaves them to
    `topk`), `torch`'s random stream is seeded per sample, layer and seed, queries have the module's query norm in every family
    (kvpress knows Qwen3 and Gemma3 only), and positions behind the prompt are the model's own, under mrope too (kvpress counts
    1-D positions). Refused, with the reason: presses that mask, merge, decode, compose, divide the budget, or load tables.
    """

    press: str
    args: Mapping[str, Any] = field(default_factory=dict)

    needs = Needs(states=True)

    def __post_init__(self) -> None:
        library = load()
        if not self.press:
            raise ConfigError(
                f"method=kvpress needs a press; allowed: methods.kvpress.press=<name>, one of {', '.join(usable(library))}"
            )
        made = _build(library, self.press, self.args, "methods.kvpress.args")
        object.__setattr__(self, "_text", json.dumps(_effective(type(made), self.args), sort_keys=True))
        object.__setattr__(self, "_draws", _draws(library, made))

    def __hash__(self) -> int:
        return hash((self.press, self._text))

    @property
    def stochastic(self) -> bool:
        """Whether the press's module, or one that it is made of, draws random numbers."""
        return self._draws

    @property
    def origin(self) -> dict[str, Any]:
        """What a cell's identity says of the code that runs: the library's version and all arguments of the press."""
        return {"args": json.loads(self._text), "kvpress": version()}

    def key(self, budget: int, length: int) -> tuple:
        return (self.press, self._text, budget)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        import torch

        made = _build(load(), self.press, self.args, "methods.kvpress.args")
        made.compression_ratio = 1 - (budget + 0.5) / obs.length
        cos, sin = (part[None].to(obs.states.dtype) for part in obs.rotation)
        kwargs = {
            "hidden_states": obs.states[None],
            "position_embeddings": (cos, sin),
            "cache_position": torch.arange(obs.length, device=obs.device),
            "past_key_values": None,
        }
        try:
            with torch.random.fork_rng([obs.device] if obs.device.type == "cuda" else []):
                torch.manual_seed(obs.generator("kvpress", seed).initial_seed() if self.stochastic else 0)
                score = made.score(_View(obs), obs.states[None], obs.key[None], obs.value[None], None, kwargs)
        except Exception as error:  # noqa: BLE001 - a press asserts what it supports, and may raise anything
            first = next(iter(str(error).splitlines()), "")
            raise UnsupportedError(
                f"kvpress' {self.press} cannot score this prompt: {type(error).__name__}: {first}"
            ) from error
        if score.shape != (1, *obs.key.shape[:2]):
            raise UnsupportedError(
                f"kvpress' {self.press} gave scores of shape {list(score.shape)}; allowed: {[1, *obs.key.shape[:2]]}"
            )
        return score[0].float()


class _View:
    """The attention module as a press sees it: with `rotary_emb`, which kvpress' own hook would attach to the module,
    and projections that include the module's norms. Everything else is the module's."""

    def __init__(self, obs: Observation):
        self._obs = obs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._obs.module, name)

    @property
    def config(self) -> Any:
        return _Config(self._obs.module)

    def q_proj(self, hidden: Tensor) -> Tensor:
        """`[1,m,E]` -> `[1,m,Hq*D]`"""
        return self._obs.project(hidden[0]).transpose(0, 1).flatten(1)[None]

    def k_proj(self, hidden: Tensor) -> Tensor:
        """`[1,m,E]` -> `[1,m,Hkv*D]`"""
        module = self._obs.module
        key, norm = module.k_proj(hidden), getattr(module, "k_norm", None)
        return key if norm is None else norm(key.unflatten(-1, (-1, module.head_dim))).flatten(-2)

    def rotary_emb(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin `[1,n,D]` in the dtype of `like` at positions `[1,n]`, counted from the prompt's first token."""
        offsets = positions[0] - (self._obs.length - 1)
        if int(offsets.min()) < 1:
            raise UnsupportedError("it asks for rotations inside the prompt, which mrope does not count along one axis")
        cos, sin = self._obs.rope(offsets)
        return cos[None].to(like.dtype), sin[None].to(like.dtype)


class _Config:
    """The text model's configuration, with the `head_dim` that some families leave out and some presses read."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        config = self._module.config
        return getattr(config, name, self._module.head_dim) if name == "head_dim" else getattr(config, name)


def load() -> ModuleType:
    """The installed kvpress. What its import does to transformers' attention functions, for all models of the process, is
    taken back: only its masking presses need that, and they are refused.

    Raises:
        ConfigError: it is not installed, or cannot be imported beside this package's versions.
    """
    if "kvpress" in sys.modules:
        return sys.modules["kvpress"]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        import kvpress
    except ModuleNotFoundError as error:
        if error.name == "kvpress":
            raise ConfigError(
                f"method=kvpress needs the package kvpress, which is not installed; run: {_INSTALL}"
            ) from None
        raise ConfigError(f"kvpress needs the package {error.name}, which is not installed; run: {_INSTALL}") from error
    except Exception as error:  # noqa: BLE001 - another version's import may fail in any way
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"kvpress cannot be imported beside this transformers ({type(error).__name__}: {first}); versions that can be: "
            f"{', '.join(CHECKED)}; run: {_INSTALL}"
        ) from error
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                ALL_ATTENTION_FUNCTIONS[name] = function
    return kvpress


def version() -> str:
    """kvpress' version, which decides what its presses compute.

    Raises:
        ConfigError: the package has no metadata, so that rows could not say what made them.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("kvpress")
    except PackageNotFoundError:
        raise ConfigError(f"kvpress has no version metadata; install it with pip: {_INSTALL}") from None


def usable(library: ModuleType) -> list[str]:
    """Names of the presses that only score, sorted."""
    return sorted(name for name, cls in _presses(library).items() if _refusal(library, name, cls) is None)


def _presses(library: ModuleType) -> dict[str, type]:
    found = {name: value for name, value in vars(library).items() if inspect.isclass(value)}
    return {name: cls for name, cls in found.items() if issubclass(cls, library.BasePress)}


def _refusal(library: ModuleType, name: str, cls: type) -> str | None:
    """Why a press cannot be used, None if it can."""
    if cls in (library.BasePress, library.ScorerPress):
        return "it is a base class"
    if name in _HINTS:
        return _HINTS[name]
    for method, reason in _OVERRIDES.items():
        common = getattr(library.ScorerPress, method)
        if getattr(cls, method) is not common and not (method == "post_init_from_model" and _wraps(cls)):
            return reason
    return None if issubclass(cls, library.ScorerPress) else "it has no score of its own"


def _wraps(cls: type) -> bool:
    """Whether a press is made of another one, to which it passes the model on."""
    return "press" in inspect.signature(cls).parameters


def _build(library: ModuleType, name: str, args: Mapping[str, Any], where: str) -> Any:
    known = _presses(library)
    if name not in known:
        raise ConfigError(f"kvpress {version()} has no press {name!r}; {nearest(str(name), usable(library))}")
    reason = _refusal(library, name, known[name])
    if reason is not None:
        raise UnsupportedError(
            f"kvpress' {name} is not a press that only scores: {reason}; allowed: {', '.join(usable(library))}"
        )
    accepted = inspect.signature(known[name]).parameters
    if _RATIO in args:
        raise ConfigError(f"{where}.{_RATIO} is what the budget says; write budget=<entries or fraction kept>")
    for key in args:
        if key not in accepted:
            allowed = sorted(set(accepted) - {_RATIO})
            raise ConfigError(
                f"{where}: {name} has no argument {key!r}; {nearest(key, allowed) if allowed else 'it has none'}"
            )
    given = dict(args)
    for key in [key for key in given if key == "press" or key.endswith("_press")]:
        inner = {"press": given[key]} if isinstance(given[key], str) else dict(given[key])
        given[key] = _build(library, inner.pop("press"), inner, f"{where}.{key}")
    try:
        return known[name](**given)
    except Exception as error:  # noqa: BLE001 - a press asserts what it accepts
        raise ConfigError(f"{where}: kvpress' {name} cannot be built: {type(error).__name__}: {error}") from error


def _effective(cls: type, args: Mapping[str, Any]) -> dict[str, Any]:
    """All plain arguments, defaults included; whole numbers given for real ones are real."""
    found = {}
    for key, parameter in inspect.signature(cls).parameters.items():
        default = parameter.default
        if key in args:
            value = args[key]
            real = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            found[key] = float(value) if real else value
        elif key != _RATIO and (default is None or isinstance(default, (bool, int, float, str))):
            found[key] = default
    return found


def _draws(library: ModuleType, made: Any) -> bool:
    classes = {type(made), *(type(value) for value in vars(made).values() if isinstance(value, library.BasePress))}
    imported = {c for cls in classes for c in vars(inspect.getmodule(cls)).values() if inspect.isclass(c)}
    own = {c for c in classes | imported if issubclass(c, library.BasePress)}
    return any("torch.rand" in inspect.getsource(inspect.getmodule(c)) for c in own)

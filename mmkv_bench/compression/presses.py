"""The optional library kvpress: import it, list the usable presses, and build them from a configuration."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError, first_line, nearest

CHECKED = ("0.4.3", "0.5.3", "0.5.5")
"""Versions whose presses were run, through this package, with the pinned torch and transformers. 0.5.5's forward hook
fails with these (KeyError: 'cache_position'), so the library alone cannot serve as a reference in this environment."""
_INSTALL = f"pip install 'mmkv-bench[kvpress]' && pip install --no-deps kvpress=={CHECKED[-1]}"
RATIO = "compression_ratio"
ADA, CRITICAL_ADA = "AdaKVPress", "CriticalAdaKVPress"
POOLED = (ADA, CRITICAL_ADA)
"""Presses that only mask in the library; here they are run as scores with an allocation of this package."""

_HUB = "it reads {} of the hub, made for a few text models"
_DECODING = "it evicts while the answer is decoded, from queries that a prefill does not have"
_WITHIN = "it {}; name its inner press instead"
_REPLAY = (
    "it scores with further passes over a repetition of the prompt, which placeholders of images cannot repeat (KVzip feeds "
    "token ids alone)"
)
REFUSED = {
    "BlockPress": _WITHIN.format(
        "scores and evicts block by block, each block after the eviction of the one before it"
    ),
    "CAMPress": "it merges values while the answer is decoded",
    "ChunkKVPress": _WITHIN.format("keeps whole chunks, the same in every head, instead of entries"),
    "ChunkPress": _WITHIN.format("divides the budget evenly among pieces of the prompt and evicts in each by itself"),
    "ComposedPress": "it evicts in several steps, so no single score decides what stays",
    "CompressionRatioDecodingPress": _DECODING,
    "DMSPress": _WITHIN.format("keeps what lies above a threshold, whatever the budget"),
    "DecodingPress": _DECODING,
    "DuoAttentionPress": _HUB.format("attention patterns"),
    "EntropyGatedChunkKVPress": _WITHIN.format("keeps chunks, the same in every head, instead of entries"),
    "ExpectedAttentionStatsPress": _HUB.format("query statistics")
    + "; ExpectedAttentionPress measures the prompt's own",
    "FastKVzipPress": _HUB.format("gates"),
    "FinchPress": "it wants a delimiter token between context and question, which prompts of the benchmarks do not have",
    "KVComposePress": "it scores with the whole attention of further passes over prompts that its caller writes",
    "KVgradPress": _REPLAY + ", and through gradients of the model",
    "KVzapPress": _HUB.format("surrogate models"),
    "KVzipPress": _REPLAY,
    "KeyRerotationPress": _WITHIN.format("rotates the kept keys to other positions"),
    "LUKVPress": _HUB.format("budget curves"),
    "MergingPress": _WITHIN.format("merges evicted values into kept ones"),
    "ObservedAttentionPress": "it wants the whole T x T attention; method=h2o sums its columns in O(T) memory",
    "PerLayerCompressionPress": _WITHIN.format("takes a list of ratios, one a layer, instead of a budget"),
    "PrefillDecodingPress": _DECODING,
    "PyramidKVPress": "it divides the budget among layers in the library's way; method=pyramidkv follows the paper",
    "QFilterPress": _HUB.format("filters"),
    "RestoreKVPress": _HUB.format("adapters"),
    "SimLayerKVPress": "it keeps every entry of the layers that it does not call lazy, whatever the budget",
    "ThinKPress": "it zeroes channels of the keys and evicts no entry",
}
"""Presses of the checked versions that cannot be run, and why."""
_OVERRIDES = {
    "__call__": "it runs the model itself, with its own passes or tables",
    "forward_hook": "it overrides the hook, to decode, mask or compose",
    "compress": "it changes keys and values, or divides the budget, instead of scoring entries",
    "post_init_from_model": "it loads tables or weights for each model",
}
"""Method -> why a press that overrides it cannot be run; for presses that are not listed by name."""


def load() -> ModuleType:
    """Return the imported kvpress.

    Importing kvpress changes transformers' attention functions for all models of the process. This function undoes the
    change, which serves only the library's masking.

    Raises:
        ConfigError: kvpress is not installed, or cannot be imported with this package's versions.
    """
    if "kvpress" in sys.modules:
        return sys.modules["kvpress"]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        import kvpress
    except ModuleNotFoundError as error:
        if error.name == "kvpress":
            raise ConfigError(
                f"method=kvpress needs the package kvpress, which is not installed; run: {_INSTALL}"
            ) from None
        raise ConfigError(f"kvpress needs the package {error.name}, which is not installed; run: {_INSTALL}") from error
    except Exception as error:  # another version's import may fail in any way
        raise ConfigError(
            f"kvpress cannot be imported with this transformers ({first_line(error)}); versions that were "
            f"checked: {', '.join(CHECKED)}; run: {_INSTALL}"
        ) from error
    finally:
        for name, function in stock.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                ALL_ATTENTION_FUNCTIONS[name] = function
    return kvpress


def version() -> str:
    """Return kvpress' version, which decides what its presses compute. Raises ConfigError: the package has no metadata."""
    try:
        return importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"kvpress has no version metadata; install it with pip: {_INSTALL}") from None


def usable(library: ModuleType) -> list[str]:
    """Return the names of presses that can be used, sorted."""
    return sorted(name for name, cls in presses(library).items() if refusal(library, name, cls) is None)


def presses(library: ModuleType) -> dict[str, type]:
    """Return every press that the library exports, by name."""
    classes = {name: value for name, value in vars(library).items() if inspect.isclass(value)}
    return {name: cls for name, cls in classes.items() if issubclass(cls, library.BasePress)}


def refusal(library: ModuleType, name: str, cls: type) -> str | None:
    """Return the reason why a press (a class of kvpress) cannot be used; None if it can."""
    if cls in (library.BasePress, library.ScorerPress):
        return "it is a base class"
    if name in REFUSED or name in POOLED:
        return REFUSED.get(name)
    for method, reason in _OVERRIDES.items():
        common = getattr(library.ScorerPress, method)
        if getattr(cls, method) is not common and not (method == "post_init_from_model" and _wraps(cls)):
            return reason
    return None if issubclass(cls, library.ScorerPress) else "it defines no score"


def _wraps(cls: type) -> bool:
    return "press" in inspect.signature(cls).parameters


def build(library: ModuleType, name: str, args: Mapping[str, Any], where: str, inside: str = "") -> Any:
    """Build the press with class name `name` from its constructor arguments, and a press among the arguments likewise.

    where: name of the arguments in messages. inside: name of the press that takes this press as an argument, or "".

    Raises:
        ConfigError: an unknown press or argument, or arguments that the press does not take.
        UnsupportedError: a press that cannot be run.
    """
    classes = presses(library)
    if name not in classes:
        raise ConfigError(f"kvpress {version()} has no press {name!r}; {nearest(str(name), usable(library))}")
    reason = refusal(library, name, classes[name])
    if reason is not None:
        raise UnsupportedError(
            f"kvpress' {name} cannot be used, because {reason}; allowed: {', '.join(usable(library))}"
        )
    if inside and name in POOLED:
        raise UnsupportedError(
            f"kvpress' {name} divides the budget among heads, so it has no score that {inside} could read; "
            f"allowed: {', '.join(other for other in usable(library) if other not in POOLED)}"
        )
    accepted = inspect.signature(classes[name]).parameters
    if RATIO in args:
        raise ConfigError(f"{where}.{RATIO} is set by the budget; write budget=<entries or fraction kept> instead")
    for key in args:
        if key not in accepted:
            allowed = sorted(set(accepted) - {RATIO})
            raise ConfigError(f"{where}: {name} has no argument {key!r}; {nearest(str(key), allowed)}")
    arguments = dict(args)
    for key in filter(_is_press, args):
        inner, inner_args = _inner(args[key], f"{where}.{key}")
        arguments[key] = build(library, inner, inner_args, f"{where}.{key}", name)
    try:
        return classes[name](**arguments)
    except Exception as error:  # a press asserts what it accepts
        raise ConfigError(f"{where}: kvpress' {name} cannot be built: {type(error).__name__}: {error}") from error


def _is_press(key: str) -> bool:
    return key == "press" or key.endswith("_press")


def _inner(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a press that is an argument of another press."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("press"), str):
        inner_args = {key: item for key, item in value.items() if key != "press"}
        return value["press"], dict(inner_args["args"]) if isinstance(inner_args.get("args"), Mapping) else inner_args
    raise ConfigError(
        f"{where} is {value!r}; allowed: a press's name, {{press: <name>, <argument>: <value>}} or {{press: <name>, args: "
        "{<argument>: <value>}}"
    )


def effective(library: ModuleType, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return all plain arguments of a press, and of presses among its arguments, defaults included.

    Integers given for float arguments become floats.
    """
    effective_args: dict[str, Any] = {}
    for key, parameter in inspect.signature(presses(library)[name]).parameters.items():
        default = parameter.default
        if key in args and _is_press(key):
            inner, inner_args = _inner(args[key], key)
            effective_args[key] = {"press": inner, "args": effective(library, inner, inner_args)}
        elif key in args:
            value = args[key]
            is_whole_number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            effective_args[key] = float(value) if is_whole_number else value
        elif key != RATIO and (default is None or isinstance(default, (bool, int, float, str))):
            effective_args[key] = default
    return effective_args


def chain(library: ModuleType, made: Any) -> list[Any]:
    """Return the given press, the press that it wraps, and so on to the innermost press."""
    wrapped = [made]
    while isinstance(getattr(wrapped[-1], "press", None), library.BasePress):
        wrapped.append(wrapped[-1].press)
    return wrapped


def draws(library: ModuleType, made: Any) -> bool:
    """Tell whether a press, or one that it wraps, draws random numbers."""
    classes_used = {type(part) for press in chain(library, made) for part in (press, *vars(press).values())}
    classes = {cls for cls in classes_used if issubclass(cls, library.BasePress)}
    imported_classes = {c for cls in classes for c in vars(_module(cls)).values() if inspect.isclass(c)}
    press_classes = {c for c in classes | imported_classes if issubclass(c, library.BasePress)}
    return any("torch.rand" in inspect.getsource(_module(c)) for c in press_classes)


def _module(cls: type) -> ModuleType:
    return sys.modules[cls.__module__]

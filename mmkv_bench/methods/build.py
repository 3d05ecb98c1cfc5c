"""A composed method node (`conf/method/*.yaml`) -> a `Compressor`.

A node holds flat parameters, four parts that refer to them by interpolation, and `released`: the parameters that the
paper's released code sets differently. Only classes of this package can be named as parts; `method=custom` takes them
from the file that its `path` names.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mmkv_bench.config.interpolations import settle
from mmkv_bench.config.shorthand import CUSTOM
from mmkv_bench.errors import ConfigError, MMKVError, nearest
from mmkv_bench.methods.compatibility import refuse
from mmkv_bench.methods.plain import DECODING, PARTS, flat_parameters, under_reading

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.compression.compressor import Compressor


class Calibrations(Protocol):
    """Where parts get what was measured of a model: `calibrate.artefact.Calibrations` is one."""

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        """What a part of this method is built with; spec: what the configuration says (`auto`, or a path)."""


CALIBRATION = "calibration"
"""Parameter of parts that are built with what was measured of a model beforehand."""
FULL = "full"
"""`base` of the method that compresses nothing: it has no budget, seed or reading."""
KVPRESS = "kvpress"
"""`base` of the method whose scorer comes from the installed package kvpress."""
READS_ANSWER = "reads_answer"
"""Parameter in the rows of methods that cheat: they know the answer of the full cache."""
OVER_BUDGET = "over_budget"
"""Parameter in the rows of methods of `reading=paper` whose own formula may keep more than the budget."""
HALF_PRECISION = ("bfloat16", "float16")
"""Dtypes of models in which a release's rounding of its scores is seen."""
OUTSIDE = {CUSTOM: ("path", "name"), KVPRESS: ("press",)}
"""Methods whose code is not in this package -> the parameters that say which code it is. They cannot run without."""

_PACKAGE = "mmkv_bench."


def effective(name: str, node: DictConfig, reading: str, defaults: DictConfig | None = None) -> dict[str, Any]:
    """The node as it runs under a reading: released values applied, interpolations resolved, plain Python values.

    Args:
        name: the method's name, for messages.
        node: composed node, interpolations unresolved.
        reading: `paper` or `released`.
        defaults: the node without the user's overrides. With it, whole numbers given for real parameters become real
            (so that 3 and 3.0 are one cell), and a parameter both overridden and set by `released` is refused.

    Raises:
        ConfigError: unknown reading, a `released` key that the node does not have, an interpolation that leads nowhere.
    """
    return under_reading(name, _raw(node), reading, None if defaults is None else _raw(defaults))


def _raw(node: DictConfig) -> dict[str, Any]:
    """A node as plain values; of its interpolations only the relative ones are left, which its reading still changes."""
    from omegaconf import OmegaConf

    copy = OmegaConf.create(OmegaConf.to_container(node, resolve=False))
    settle(copy)
    return OmegaConf.to_container(copy, resolve=False)


def build_compressor(
    name: str,
    node: DictConfig,
    reading: str,
    defaults: DictConfig | None = None,
    calibrations: Calibrations | None = None,
) -> Compressor:
    """Build the `Compressor` that a composed node describes.

    Args:
        name: display name; node: composed node; reading: `paper` or `released`; defaults: see `effective`.
        calibrations: artefacts of the run's model. Without them parts keep what the configuration says (`auto`, a
            path), can be checked, and refuse to work.

    Raises:
        ConfigError: a part that is missing, is not this package's or refuses its parameters; also CalibrationError.
    """
    return composed(name, effective(name, node, reading, defaults), reading, calibrations)


def composed(
    name: str,
    plain: Mapping[str, Any],
    reading: str,
    calibrations: Calibrations | None = None,
    own: Mapping[str, Any] | None = None,
) -> Compressor:
    """The `Compressor` of an effective node; own: built parts, for those that its file would name. Errors as above."""
    from mmkv_bench.compression.compressor import Compressor

    if plain.get("base") == FULL:
        return Compressor(name=name)
    parts = {part: plain.get(part) for part in (*PARTS, DECODING)}
    own = _outside(name, plain) if own is None else dict(own)
    parts |= own
    optional = (
        (DECODING,) if parts[DECODING] is None else ("scorer",)
    )  # without a scorer, only quantising is left to do
    missing = [part for part in PARTS if parts[part] is None and part not in optional]
    if missing:
        raise ConfigError(
            f"method {name} has no {', '.join(missing)}; a method is composed of {', '.join(PARTS)}; add them to its file"
        )
    built = own | {
        part: _instantiate(f"methods.{name}.{part}", spec, calibrations)
        for part, spec in parts.items()
        if spec is not None and part not in own
    }
    for part, value in built.items():
        base = _base_class(part)
        if not isinstance(value, base):
            raise ConfigError(
                f"methods.{name}.{part} is a {type(value).__name__}; allowed: subclasses of {base.__name__}; name one of "
                f"{_home(part)}"
            )
    compressor = Compressor(name=name, reading=reading, **built)
    refuse(compressor)
    return compressor


def _outside(name: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Built parts whose code is not in this package; empty for all methods but those of `OUTSIDE`."""
    if plain.get("base") == CUSTOM:
        from mmkv_bench.methods import own_file

        return own_file.parts(plain, name)
    if plain.get("base") == KVPRESS:
        from mmkv_bench.compression.scorers.kvpress import parts

        return parts(plain)
    return {}


def parameters_json(plain: Mapping[str, Any], decoding: str | None = None) -> str:
    """Flat parameters of an effective node as sorted JSON, for the `parameters` column; `decoding` describes a decode
    policy that the user put in place of the file's."""
    own = {} if decoding is None else {DECODING: decoding}
    return json.dumps(flat_parameters(plain) | own, sort_keys=True)


def identity_form(plain: Mapping[str, Any], compressor: Compressor, dtype: str | None = None) -> dict[str, Any]:
    """An effective node as rows and a cell's identity hold it: code that is not in this package is named by what it is
    (a file's checksum, a package's version), never by where it lies; a scorer that is given the full cache's answer is
    marked, whoever wrote it, so that tables can tell a ceiling from a method; so is a formula that goes over its budget.
    Parameters that came later are absent at their defaults, and those that only half precision reads in any other `dtype`
    (of the model, None while it is unknown)."""
    marks = {READS_ANSWER: True} if compressor.needs.answer else {}
    marks |= {OVER_BUDGET: True} if compressor.exceeds_as_printed and compressor.reading != "released" else {}
    if plain.get("base") == CUSTOM:
        from mmkv_bench.methods import own_file

        return own_file.identity_form(plain) | marks
    return _as_before(plain, compressor, dtype) | (getattr(compressor.scorer, "origin", None) or {}) | marks


def _as_before(plain: Mapping[str, Any], compressor: Compressor, dtype: str | None) -> dict[str, Any]:
    """The node without parameters that came after its first cells (`later` of a part's class) where they have their
    defaults or change nothing (`halves`), so that those cells keep their hashes and rows."""
    node = dict(plain)
    for part in PARTS:
        built, spec = getattr(compressor, part), node.get(part)
        unread = () if dtype in (None, *HALF_PRECISION) else getattr(built, "halves", ())
        for name in getattr(built, "later", ()) if isinstance(spec, Mapping) else ():
            if name in unread or getattr(built, name) == inspect.signature(type(built)).parameters[name].default:
                node.pop(name, None)
                node[part] = {key: value for key, value in node[part].items() if key != name}
    return node


def with_checksums(plain: Mapping[str, Any], used: Mapping[str, str]) -> dict[str, Any]:
    """An effective node whose `calibration` says which artefacts it got (method -> checksum) and not where they lie:
    what rows and a cell's identity hold. A node that got none is returned as it is."""
    if not used:
        return dict(plain)
    return _without(plain, CALIBRATION) | {CALIBRATION: dict(used)}


def _without(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _without(item, key) for name, item in value.items() if name != key}
    return [_without(item, key) for item in value] if isinstance(value, list) else value


def _instantiate(path: str, spec: Any, calibrations: Calibrations | None = None) -> Any:
    """A part from its `_target_` and parameters. Hydra's `instantiate` would import any name a config holds; this one
    takes classes that a module of this package defines itself, nothing else. A part with a `calibration` gets the data
    of the artefact that its class is `calibrated_by`, unless `needs_calibration(parameters)` denies that it reads one."""
    if isinstance(spec, list):
        return [_instantiate(f"{path}[{i}]", item, calibrations) for i, item in enumerate(spec)]
    if not isinstance(spec, Mapping):
        return spec
    arguments = {k: _instantiate(f"{path}.{k}", v, calibrations) for k, v in spec.items() if k != "_target_"}
    if "_target_" not in spec:
        return arguments
    cls = _locate(path, str(spec["_target_"]))
    reads = getattr(cls, "needs_calibration", lambda parameters: True)
    if calibrations is not None and isinstance(arguments.get(CALIBRATION), str) and reads(arguments):
        if not hasattr(cls, "calibrated_by"):
            raise ConfigError(
                f"{path}: {cls.__name__} does not say which calibration it takes, so {CALIBRATION}="
                f"{arguments[CALIBRATION]} cannot be found; give its class the attribute calibrated_by"
            )
        arguments[CALIBRATION] = calibrations.data(cls.calibrated_by, arguments[CALIBRATION])
    accepted = inspect.signature(cls).parameters
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        raise ConfigError(f"{path}: {cls.__name__} has no parameter {unknown[0]!r}; {nearest(unknown[0], accepted)}")
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {cls.__name__} cannot be built: {error}; correct its parameters") from error
    except MMKVError as error:
        raise ConfigError(f"{path}: {error}") from error


def _locate(path: str, target: str) -> type:
    module_name, _, class_name = target.rpartition(".")
    if not target.startswith(_PACKAGE) or not class_name:
        raise ConfigError(f"{path}._target_={target!r} is outside this package; allowed: classes below {_PACKAGE}*")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise ConfigError(f"{path}._target_={target!r}: there is no module {error.name}; correct the name") from None
    if not inspect.isclass(found) or found.__module__ != module_name:
        raise ConfigError(f"{path}._target_={target!r} is not a class defined in {module_name}; correct the name")
    return found


def _home(part: str) -> str:
    return f"mmkv_bench.compression.{part if part == DECODING else part + 's'}"


def _base_class(part: str) -> type:
    name = "DecodePolicy" if part == DECODING else part.capitalize()
    return getattr(importlib.import_module(f"{_home(part)}.base"), name)

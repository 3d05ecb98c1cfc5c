"""Build compressors: a composed method node (`conf/method/*.yaml`) -> a `Compressor`.

A node is the configuration of one method, with its parameters and its parts (scorer, allocator, selector, reducer, decode
policy). Parts are classes of this package only. `method=custom` takes parts from the user's file that its `path` names.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.config.method_parts import FOLDERS, base_class
from mmkv_bench.config.overrides import same_kind
from mmkv_bench.config.shorthand import CUSTOM
from mmkv_bench.errors import ConfigError, MMKVError, nearest
from mmkv_bench.methods import method_file
from mmkv_bench.methods.method_file import SELECTOR
from mmkv_bench.methods.node import CALIBRATION, DECODING, PARTS, flat_parameters, read, under_reading
from mmkv_bench.methods.part_rules import refuse

if TYPE_CHECKING:
    from mmkv_bench.compression.compressor import Compressor


FULL = "full"
"""`base` of the method that compresses nothing; it has no budget, seed or reading."""
KVPRESS = "kvpress"
"""`base` of the method whose scorer comes from the installed package kvpress."""
OUTSIDE = {CUSTOM: ("path", "name"), KVPRESS: ("press",)}
"""Methods whose code is not in this package -> the parameters that name the code. These parameters are required."""
READS_ANSWER = "reads_answer"
"""Parameter in the rows of methods that cheat: they read the full cache's answer."""
OVER_BUDGET = "over_budget"
"""Parameter in the rows of methods of `reading=paper` whose own formula may keep more than the budget."""
HALF_PRECISION = ("bfloat16", "float16")
"""Model dtypes in which a release's rounding of its scores has an effect."""

_PACKAGE = "mmkv_bench."


class CalibrationSource(Protocol):
    """A source of calibration data for methods; `calibrate.artefact.Calibrations` implements it."""

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        """Return the calibration data with which a part of this method is built. spec: the configured value, `auto` or a path."""


def build_compressor(
    name: str,
    node: Mapping[str, Any],
    reading: str,
    defaults: Mapping[str, Any] | None = None,
    calibrations: CalibrationSource | None = None,
) -> Compressor:
    """Build the `Compressor` that a composed method node describes.

    Args:
        name: display name.
        node: composed node, with its interpolations unresolved.
        reading: `paper` or `released`.
        defaults: see `node.under_reading`.
        calibrations: calibration artefacts of the run's model. Without them parts keep the configured value (`auto`, a
            path). Such parts can be checked, but refuse to work.

    Raises:
        ConfigError: a part is missing, is not of this package or refuses its parameters; also CalibrationError.
    """
    return compressor_of(name, under_reading(name, node, reading, defaults), reading, calibrations)


def compressor_of(
    name: str,
    node: Mapping[str, Any],
    reading: str,
    calibrations: CalibrationSource | None = None,
    given: Mapping[str, Any] | None = None,
) -> Compressor:
    """Build the `Compressor` of an effective node, which has its values for one reading and no interpolations.

    given: parts that are built already, so that no method file is read for them. The other arguments: see `build_compressor`.
    """
    from mmkv_bench.compression.compressor import Compressor

    if node.get("base") == FULL:
        return Compressor(name=name)
    given = _external_parts(name, node) if given is None else given
    specs = {part: given.get(part, node.get(part)) for part in FOLDERS}
    optional = (DECODING,) if specs[DECODING] is None else ("scorer",)  # without a scorer, a policy can still quantise
    missing = [part for part in PARTS if specs[part] is None and part not in optional]
    if missing:
        raise ConfigError(
            f"method {name} has no {', '.join(missing)}; a method is composed of {', '.join(PARTS)}; add them to its file"
        )
    parts = {
        part: spec if part in given else _instantiate(f"methods.{name}.{part}", spec, calibrations)
        for part, spec in specs.items()
        if spec is not None
    }
    for part, built in parts.items():
        if not isinstance(built, base := base_class(part)):
            raise ConfigError(
                f"methods.{name}.{part} is a {type(built).__name__}; allowed: subclasses of {base.__name__}; name one of "
                f"mmkv_bench.compression.{FOLDERS[part]}"
            )
    compressor = Compressor(name=name, reading=reading, **parts)
    refuse(compressor)
    return compressor


def _external_parts(name: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Build the parts of a method whose code is not in this package (kvpress, a user's file); {} for other methods."""
    if node.get("base") == CUSTOM:
        return method_file.parts(node, name)
    if node.get("base") == KVPRESS:
        from mmkv_bench.compression.scorers.kvpress import parts

        return parts(node)
    return {}


def identity_form(node: Mapping[str, Any], compressor: Compressor, dtype: str | None = None) -> dict[str, Any]:
    """Return an effective method node as rows store it; the form enters the hash of the (method, budget) setting.

    Code outside of this package is named by its content (a file's checksum, a package's version), never by its path.
    Two marks are added for tables: `READS_ANSWER` if the scorer reads the full cache's answer (the method is a ceiling), and
    `OVER_BUDGET` if the paper's own formula may exceed the budget (not under `reading=released`).
    A parameter that was added after the method's first rows is left out at its default, or if only half precision uses it and
    the model has another precision, so that hashes do not change.

    dtype: the model's precision; None: unknown.
    """
    marks = {READS_ANSWER: True} if compressor.needs.answer else {}
    marks |= {OVER_BUDGET: True} if compressor.exceeds_as_printed and compressor.reading != "released" else {}
    if node.get("base") == CUSTOM:
        return method_file.identity_form(node) | marks
    return (
        _without_later_parameters(node, compressor, dtype) | (getattr(compressor.scorer, "origin", None) or {}) | marks
    )


def _without_later_parameters(node: Mapping[str, Any], compressor: Compressor, dtype: str | None) -> dict[str, Any]:
    """Return the node without later parameters that have their default, or no effect at the model's precision.

    Later parameters were added after the method's first rows. They are listed in `later` of a part's class or of the method's
    file; `halves` of the class lists those that only half precision uses.
    """
    form = dict(node)
    for part in PARTS:
        built, spec = getattr(compressor, part), form.get(part)
        unread_names = () if dtype in (None, *HALF_PRECISION) else getattr(built, "halves", ())
        later_names = (
            *getattr(built, "later", ()),
            *(name for name in node.get("later") or () if hasattr(built, name)),
        )
        for name in later_names if isinstance(spec, Mapping) else ():
            if name in unread_names or getattr(built, name) == inspect.signature(type(built)).parameters[name].default:
                form.pop(name, None)
                form[part] = {key: value for key, value in form[part].items() if key != name}
    return form


def _instantiate(path: str, spec: Any, calibrations: CalibrationSource | None = None) -> Any:
    """Build a part from its `_target_` and parameters. path: the part's key in the configuration, for messages.

    Hydra's `instantiate` imports any name in a configuration; this function only takes classes that a module of this package
    defines itself. A part with a parameter `calibration` gets the data of the artefact named by its class's `calibrated_by`,
    unless `needs_calibration(parameters)` of the class returns False.
    """
    if isinstance(spec, list):
        return [_instantiate(f"{path}[{i}]", item, calibrations) for i, item in enumerate(spec)]
    if not isinstance(spec, Mapping):
        return spec
    arguments = {k: _instantiate(f"{path}.{k}", v, calibrations) for k, v in spec.items() if k != "_target_"}
    if "_target_" not in spec:
        return arguments
    cls = _locate(path, str(spec["_target_"]))
    reads_calibration = getattr(cls, "needs_calibration", lambda parameters: True)
    if calibrations is not None and isinstance(arguments.get(CALIBRATION), str) and reads_calibration(arguments):
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
        cls = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise ConfigError(f"{path}._target_={target!r}: there is no module {error.name}; correct the name") from None
    if not inspect.isclass(cls) or cls.__module__ != module_name:
        raise ConfigError(f"{path}._target_={target!r} is not a class defined in {module_name}; correct the name")
    return cls


def method(
    name: str | Path | Scorer | type[Scorer],
    *,
    reading: str = "paper",
    calibrations: CalibrationSource | None = None,
    **parameters: Any,
) -> Compressor:
    """Build a method as the compressor that a run would use with the same settings.

    Args:
        name: a method of docs/methods.md; a file of your own (`"mine.py"`, any parts, as `method=mine.py` takes it); or
            a scorer of your own, as an object or a class. A scorer gets the other parts of `custom`: uniform budgets,
            selection of the last token and the highest scores, eviction.
        reading: `paper`, or `released` for what the paper's released code does.
        calibrations: artefacts of one model. Without them a calibrated method can be inspected but refuses to work.
        parameters: the method's parameters, as in docs/methods.md (`window=16`); for a file or a scorer, the arguments
            of its constructors, and `sinks`, `recents` and `window` of the selector.

    Returns:
        A frozen `Compressor`; its parts are frozen dataclasses, so equal settings compare equal.

    Raises:
        ConfigError: an unknown method or parameter, a value of another type than its default, parts that make no sense
            together. CalibrationError: a calibrated method without its artefact.

    Example:
        >>> from mmkv_bench import method
        >>> method("snapkv", window=16).scorer.window
        16
    """
    name = os.fspath(name) if isinstance(name, Path) else name
    if isinstance(name, str) and name.endswith(".py"):
        return _file_method(Path(name), reading, parameters)
    if isinstance(name, str):
        return compressor_of(name, settings(name, reading, parameters), reading, calibrations)
    return _scorer_method(name, reading, parameters)


def settings(name: str, reading: str = "paper", parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the effective node of a shipped method: its file's values for a reading, with the given parameters.

    Raises the errors of `method`.
    """
    defaults = read(name)
    allowed = flat_parameters(defaults)
    values = {key: os.fspath(value) if isinstance(value, Path) else value for key, value in (parameters or {}).items()}
    for key, value in values.items():
        if key not in allowed:
            raise ConfigError(f"method {name} has no parameter {key!r}; {nearest(key, allowed)}")
        if not (same_kind(value, allowed[key], key) or value is allowed[key]):
            raise ConfigError(
                f"method {name}: {key}={value!r} has another type than the default {allowed[key]!r}; give a value "
                "of the default's type"
            )
    return under_reading(name, {**defaults, **values}, reading, defaults)


def _file_method(file: Path, reading: str, parameters: Mapping[str, Any]) -> Compressor:
    """Build a user's Python file as `method=<file>` does. The method is named after the file, without suffix."""
    arguments = {key: value for key, value in parameters.items() if key not in SELECTOR}
    selector = {key: value for key, value in parameters.items() if key in SELECTOR}
    return compressor_of(
        file.stem, settings(CUSTOM, reading, selector | {"path": str(file), "args": arguments}), reading
    )


def _scorer_method(scorer: Scorer | type[Scorer], reading: str, parameters: Mapping[str, Any]) -> Compressor:
    """Build a compressor around the caller's scorer, with the other parts of `method=custom`.

    parameters: arguments of the scorer's constructor, if it is a class, and `sinks`, `recents` and `window` of the selector.
    """
    selector, built = dict(parameters), scorer
    if isinstance(scorer, type) and issubclass(scorer, Scorer):
        arguments = {key: selector.pop(key) for key in list(selector) if key in inspect.signature(scorer).parameters}
        try:
            built = scorer(**arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{scorer.__name__} cannot be built: {error}; correct its parameters") from error
    if not isinstance(built, Scorer):
        raise ConfigError(
            f"{built!r} is not a method; allowed: a method's name, a Scorer (an object or its class), or a Compressor"
        )
    title = type(built).__name__
    unknown = [key for key in selector if key not in SELECTOR]
    if unknown:
        raise ConfigError(f"{title} takes no parameter {unknown[0]!r}; {nearest(unknown[0], SELECTOR)}")
    return compressor_of(title, settings(CUSTOM, reading, selector), reading, given={"scorer": built})

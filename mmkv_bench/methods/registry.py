"""Public API to methods: a name and parameters, or a user's scorer -> the `Compressor`, without a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.config.overrides import same_kind
from mmkv_bench.config.shorthand import CUSTOM
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.methods.build import CalibrationSource, compressor_of
from mmkv_bench.methods.method_file import SELECTOR
from mmkv_bench.methods.node import flat_parameters, read, under_reading

if TYPE_CHECKING:
    from mmkv_bench.compression.compressor import Compressor


def method(
    name: str | Path | Scorer | type[Scorer],
    *,
    reading: str = "paper",
    calibrations: CalibrationSource | None = None,
    **parameters: Any,
) -> Compressor:
    """Build a method as the compressor that a run would use with the same settings.

    Args:
        name: a method of docs/methods.md; a file of your own (`"mine.py"`, any parts, as `method=mine.py` takes it); or a
            scorer of your own, as an object or a class, which gets what `custom` gives it: uniform budgets, the highest
            scores beside the last token, eviction.
        reading: `paper`, or `released` for what the paper's released code does.
        calibrations: artefacts of one model. Without them a calibrated method can be inspected and refuses to work.
        parameters: those of the method, as in docs/methods.md (`window=16`); for a file or a scorer those of its
            constructors, and `sinks`, `recents` and `window` of the selector.

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
        return _of_file(Path(name), reading, parameters)
    if isinstance(name, str):
        return compressor_of(name, settings(name, reading, parameters), reading, calibrations)
    return _around(name, reading, parameters)


def settings(name: str, reading: str = "paper", parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the effective node of a method's file under a reading, with the given parameters; errors as of `method`."""
    defaults = read(name)
    allowed = flat_parameters(defaults)
    values = {key: os.fspath(value) if isinstance(value, Path) else value for key, value in (parameters or {}).items()}
    for key, value in values.items():
        if key not in allowed:
            raise ConfigError(f"method {name} has no parameter {key!r}; {nearest(key, allowed)}")
        if not (same_kind(value, allowed[key], key) or value is allowed[key]):
            raise ConfigError(
                f"method {name}: {key}={value!r} is of another kind than its default {allowed[key]!r}; give such a value"
            )
    return under_reading(name, {**defaults, **values}, reading, defaults)


def _of_file(file: Path, reading: str, parameters: Mapping[str, Any]) -> Compressor:
    """Build the parts of a Python file, named by its stem, as a run does with `method=<file>`."""
    arguments = {key: value for key, value in parameters.items() if key not in SELECTOR}
    selector = {key: value for key, value in parameters.items() if key in SELECTOR}
    return compressor_of(
        file.stem, settings(CUSTOM, reading, selector | {"path": str(file), "args": arguments}), reading
    )


def _around(scorer: Scorer | type[Scorer], reading: str, parameters: Mapping[str, Any]) -> Compressor:
    """Build a compressor around the caller's scorer, with the other parts of `method=custom`."""
    selector, built = dict(parameters), scorer
    if isinstance(scorer, type) and issubclass(scorer, Scorer):
        arguments = {key: selector.pop(key) for key in list(selector) if key in inspect.signature(scorer).parameters}
        try:
            built = scorer(**arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{scorer.__name__} cannot be built: {error}; correct its parameters") from error
    if not isinstance(built, Scorer):
        raise ConfigError(
            f"{built!r} is no method; allowed: a method's name, a Scorer (an object, or its class), or a Compressor"
        )
    title = type(built).__name__
    unknown = [key for key in selector if key not in SELECTOR]
    if unknown:
        raise ConfigError(f"{title} takes no parameter {unknown[0]!r}; {nearest(unknown[0], SELECTOR)}")
    return compressor_of(title, settings(CUSTOM, reading, selector), reading, given={"scorer": built})

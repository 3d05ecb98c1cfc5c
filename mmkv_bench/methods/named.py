"""The public API to methods: a name and parameters, or a scorer of one's own -> the `Compressor`, without a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.compose import same_kind
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.methods.build import CUSTOM, Calibrations, composed
from mmkv_bench.methods.own_file import SELECTOR
from mmkv_bench.methods.plain import flat_parameters, read, under_reading

if TYPE_CHECKING:
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.scorers.base import Scorer


def method(
    name: str | Path | Scorer | type[Scorer],
    *,
    reading: str = "paper",
    calibrations: Calibrations | None = None,
    **parameters: Any,
) -> Compressor:
    """A method as the compressor that a run would build with the same settings.

    Args:
        name: a method of docs/methods.md, a file of your own (`"mine.py"`: any parts, as `method=mine.py` takes it), or a
            scorer of your own: an object, or a class that is built here. A scorer gets what `custom` gives it: uniform
            budgets, the highest scores beside the last token, eviction.
        reading: `paper`, or `released` for what the paper's released code does.
        calibrations: artefacts of one model. Without them a calibrated method can be looked at and refuses to work.
        parameters: those of the method, as in docs/methods.md (`window=16`); of a file or a scorer its constructors', and
            `sinks`, `recents` and `window` of the selector.

    Returns:
        A frozen `Compressor`; its parts are frozen dataclasses, so that equal settings compare equal.

    Raises:
        ConfigError: an unknown method or parameter, a value of another kind than its default, parts that make no sense
            together. CalibrationError: a calibrated method whose artefact is not there.

    Example:
        >>> from mmkv_bench import method
        >>> method("snapkv", window=16).scorer.window
        16
    """
    name = os.fspath(name) if isinstance(name, Path) else name
    if isinstance(name, str) and name.endswith(".py"):
        return _of_file(Path(name), reading, parameters)
    if isinstance(name, str):
        return composed(name, settings(name, reading, parameters), reading, calibrations)
    return _around(name, reading, parameters)


def settings(name: str, reading: str = "paper", parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The effective node of a method's file under a reading, with the given parameters; errors as of `method`."""
    defaults = read(name)
    known = flat_parameters(defaults)
    given = {key: os.fspath(value) if isinstance(value, Path) else value for key, value in (parameters or {}).items()}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"method {name} has no parameter {key!r}; {_among(key, known)}")
        if not (same_kind(value, known[key]) or value is known[key]):
            raise ConfigError(
                f"method {name}: {key}={value!r} is of another kind than its default {known[key]!r}; give such a value"
            )
    return under_reading(name, {**defaults, **given}, reading, defaults)


def _of_file(file: Path, reading: str, parameters: Mapping[str, Any]) -> Compressor:
    """The parts of a Python file, as a run has them with `method=<file>`: named by its stem."""
    own = {key: value for key, value in parameters.items() if key not in SELECTOR}
    given = {key: value for key, value in parameters.items() if key in SELECTOR}
    return composed(file.stem, settings(CUSTOM, reading, given | {"path": str(file), "args": own}), reading)


def _around(scorer: Scorer | type[Scorer], reading: str, parameters: Mapping[str, Any]) -> Compressor:
    """A scorer of the caller's own with what `method=custom` gives one."""
    from mmkv_bench.compression.scorers.base import Scorer

    given, made = dict(parameters), scorer
    if isinstance(scorer, type) and issubclass(scorer, Scorer):
        own = {key: given.pop(key) for key in list(given) if key in inspect.signature(scorer).parameters}
        try:
            made = scorer(**own)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{scorer.__name__} cannot be built: {error}; correct its parameters") from error
    if not isinstance(made, Scorer):
        raise ConfigError(
            f"{made!r} is no method; allowed: a method's name, a Scorer (an object, or its class), or a Compressor"
        )
    title = type(made).__name__
    unknown = [key for key in given if key not in SELECTOR]
    if unknown:
        raise ConfigError(f"{title} takes no parameter {unknown[0]!r}; {_among(unknown[0], SELECTOR)}")
    return composed(title, settings(CUSTOM, reading, given), reading, own={"scorer": made})


def _among(key: str, known: Iterable[str]) -> str:
    return nearest(key, known) if known else "it has none"

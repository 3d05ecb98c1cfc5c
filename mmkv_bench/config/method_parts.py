"""Expansion of a method's file to its node: short names of parts become classes, parameters get their classes' defaults.

A part (`scorer`, `allocator`, `selector`, `reducer`, `decoding`) is written in one of these forms:

  scorer: last_query                       the class of that module with its defaults
  scorer: {window: all}                    every parameter of the class is a parameter of the method
  selector: {topk: [sinks, recents]}       only these are parameters of the method
  reducer: {merging: {metric: "${..merging}"}}      arguments one by one: values, or renamed parameters
  scorer: {_target_: <class>, ...}         the whole node, as Hydra users write it

A parameter that a part refers to (`${..window}`) and that has no value in the file gets the default of the first class that
takes it. For this the classes of parts are imported. Their modules do not load torch, so composing stays fast.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, nearest

FOLDERS = {
    "scorer": "scorers",
    "allocator": "allocators",
    "selector": "selectors",
    "reducer": "reducers",
    "decoding": "decoding",
}
"""Part of a method to the folder below `mmkv_bench/compression` with its classes, one module each."""

ALL = "all"
REQUIRED = object()
"""Default of a parameter without default, or with a default that a configuration cannot express."""

_TARGET = "_target_"
_PACKAGE = "mmkv_bench"
_KEYS_BESIDE_PARTS = ("base", "released", "later", "about")
_PUBLIC_SPELLINGS = {"lam": "lambda"}
"""Parameters of constructors whose public name is a Python keyword."""


def expanded(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole node of a method: parameters with values, parts with classes, `released`, `later` and `about`.

    Args:
        name: the method's name, used as `base` if the file has none.
        document: the content of the method's file as plain data, with parts in any form that the module's docstring lists.

    Raises:
        ConfigError: a part or parameter that does not exist, or a parameter without a value.
    """
    parts = {part: _part_node(name, part, document[part]) for part in FOLDERS if part in document}
    parameters = {key: value for key, value in document.items() if key not in (*FOLDERS, *_KEYS_BESIDE_PARTS)}
    for parameter, (target, argument) in part_parameters(parts).items():
        default_value = defaults(target).get(argument, REQUIRED)
        if parameter not in document and default_value is not REQUIRED:  # without a default it is refused when resolved
            parameters[parameter] = default_value
    other_keys = {key: document[key] for key in ("later", "about") if key in document}
    return {
        "base": document.get("base", name),
        **parameters,
        **parts,
        "released": document.get("released") or {},
        **other_keys,
    }


def part_parameters(node: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Map each parameter of a method to the first part that uses it, as (class, argument). node: see `expanded`."""
    taker_by_parameter: dict[str, tuple[str, str]] = {}
    for part in FOLDERS:
        for depth, target, argument, value in _arguments(node.get(part), 1):
            interpolation = re.fullmatch(r"\$\{(\.+)(\w+)\}", value)
            if interpolation and len(interpolation[1]) == depth + 1 and interpolation[2] not in FOLDERS:
                taker_by_parameter.setdefault(interpolation[2], (target, argument))
    return taker_by_parameter


@cache
def defaults(target: str) -> dict[str, Any]:
    """Map each field of a dataclass to its default (`REQUIRED` if it has none).

    target: the dotted name. The result is empty if this package defines no such dataclass.
    """
    module, _, name = target.rpartition(".")
    cls = _classes(module).get(name) if module.startswith(f"{_PACKAGE}.") else None
    if cls is None or not dataclasses.is_dataclass(cls):
        return {}
    return {field.name: _default(field) for field in dataclasses.fields(cls)}


def _classes(module: str) -> dict[str, type]:
    """Map the names of the classes that a module itself defines to the classes, in order; empty without the module."""
    try:
        if find_spec(module) is None:
            return {}
    except ModuleNotFoundError:  # a parent package is missing
        return {}
    module_names = vars(importlib.import_module(module))
    return {name: one for name, one in module_names.items() if inspect.isclass(one) and one.__module__ == module}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory in (dict, list):
        return field.default_factory()
    if isinstance(field.default, tuple):
        return list(field.default)
    return field.default if field.default is None or isinstance(field.default, bool | int | float | str) else REQUIRED


def base_class(part: str) -> type:
    """Return the base class of all parts of a kind. part: scorer, allocator, selector, reducer or decoding."""
    module = importlib.import_module(f"{_package_of_parts(part)}.base")
    base_type: type = getattr(module, "DecodePolicy" if part == "decoding" else part.capitalize())
    return base_type


@cache
def part_class(part: str, module: str) -> str | None:
    """Return the dotted name of the last class in a module that extends the base class of the kind `part`; None
    without one."""
    module_name, base = f"{_package_of_parts(part)}.{module}", base_class(part)
    classes = _classes(module_name).values() if module.isidentifier() else ()
    class_names = [one.__name__ for one in classes if issubclass(one, base) and one is not base]
    return f"{module_name}.{class_names[-1]}" if class_names else None


def part_classes(part: str) -> dict[str, str]:
    """Map each module of a kind of parts (scorer, allocator, ...) to the dotted name of its class."""
    files = sorted((Path(__file__).parents[1] / "compression" / FOLDERS[part]).glob("*.py"))
    return {file.stem: target for file in files if (target := part_class(part, file.stem))}


def _package_of_parts(part: str) -> str:
    return f"{_PACKAGE}.compression.{FOLDERS[part]}"


def _part_node(method: str, part: str, value: Any) -> Any:
    if value is None or (isinstance(value, Mapping) and _TARGET in value):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ConfigError(
            f"method {method}: {part} is {value}; allowed: <name>, {{<name>: all}}, {{<name>: [<parameter>, ...]}}, "
            f"{{<name>: {{<argument>: <value>}}}} with the name of a module of compression/{FOLDERS[part]}, or _target_"
        )
    ((name, given_arguments),) = value.items()
    target = part_class(part, str(name))
    if target is None:
        allowed = part_classes(part)
        raise ConfigError(f"method {method}: unknown {part} {name!r}; {nearest(str(name), allowed)}")
    arguments = defaults(target)
    argument_by_public_name = {_PUBLIC_SPELLINGS.get(argument, argument): argument for argument in arguments}
    if given_arguments == ALL or isinstance(given_arguments, (list, tuple)):
        given_arguments = {
            argument_by_public_name.get(word, word): f"${{..{word}}}"
            for word in (argument_by_public_name if given_arguments == ALL else given_arguments)
        }
    for argument in given_arguments or {}:
        if argument not in arguments:
            raise ConfigError(
                f"method {method}: {part} {name} has no parameter {argument!r}; {nearest(argument, argument_by_public_name)}"
            )
    return {_TARGET: target, **(given_arguments or {})}


def _arguments(spec: Any, depth: int) -> Iterator[tuple[int, str, str, str]]:
    """Yield each argument of a part that is text, and those of parts nested in it, as (nesting depth, class, argument, text)."""
    for argument, value in spec.items() if isinstance(spec, Mapping) else ():
        if isinstance(value, str) and argument != _TARGET:
            yield depth, str(spec.get(_TARGET, "")), str(argument), value
        yield from _arguments(value, depth + 1)

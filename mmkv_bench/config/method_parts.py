"""A method's file -> the node that a run has: parts named shortly get their classes, parameters their classes' defaults.

A part (`scorer`, `allocator`, `selector`, `reducer`, `decoding`) is written as one of

    scorer: last_query                       the class of that module with its own defaults
    scorer: {window: all}                    every parameter of the class is one of the method's
    selector: {topk: [sinks, recents]}       these are the method's
    reducer: {merging: {metric: "${..merging}"}}      arguments one by one: values, or parameters under names of their own
    scorer: {_target_: <class>, ...}         the whole node, as Hydra users write it

A parameter that a part refers to (`${..window}`) and the file gives no value for has the default of the first class that
takes it (see `classes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mmkv_bench.config import classes
from mmkv_bench.errors import ConfigError, nearest

FOLDERS = {
    "scorer": "scorers",
    "allocator": "allocators",
    "selector": "selectors",
    "reducer": "reducers",
    "decoding": "decoding",
}
"""Part of a method -> folder below `mmkv_bench/compression` that holds its classes, one module each."""

ALL = "all"

_TARGET = "_target_"
_BESIDE = ("base", "released", "about")
_SPELLED = {"lam": "lambda"}
"""Parameters of constructors whose public name is a word of Python's own."""


def expanded(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The whole node of a method: its parameters with their values, its parts with their classes, `released`, `about`.

    Args:
        name: of the method, its `base` where the file says none; document: the file's content as plain data.

    Raises:
        ConfigError: a part or parameter that does not exist, or a parameter without a value.
    """
    parts = {part: _spelled_out(name, part, document[part]) for part in FOLDERS if part in document}
    own = {key: value for key, value in document.items() if key not in (*FOLDERS, *_BESIDE)}
    for parameter, (target, argument) in taken_by(parts).items():
        cls = classes.find(target)
        default = cls.parameters.get(argument, classes.REQUIRED) if cls else classes.REQUIRED
        if (
            parameter not in document and default is not classes.REQUIRED
        ):  # without a value: refused when it is resolved
            own[parameter] = default
    about = {"about": document["about"]} if "about" in document else {}
    return {"base": document.get("base", name), **own, **parts, "released": document.get("released") or {}, **about}


def taken_by(node: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Parameter of a method -> (class, argument) of the first of its parts, all with their classes, that refers to it."""
    found: dict[str, tuple[str, str]] = {}
    for part in FOLDERS:
        for depth, target, argument, value in _arguments(node.get(part), 1):
            match = re.fullmatch(r"\$\{(\.+)(\w+)\}", value)
            if match and len(match[1]) == depth + 1 and match[2] not in FOLDERS:
                found.setdefault(match[2], (target, argument))
    return found


def _spelled_out(method: str, part: str, value: Any) -> Any:
    if value is None or (isinstance(value, Mapping) and _TARGET in value):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ConfigError(
            f"method {method}: {part} is {value}; allowed: <name>, {{<name>: all}}, {{<name>: [<parameter>, ...]}}, "
            f"{{<name>: {{<argument>: <value>}}}} with the name of a module of compression/{FOLDERS[part]}, or _target_"
        )
    ((name, given),) = value.items()
    known = classes.parts(FOLDERS[part])
    if name not in known:
        raise ConfigError(f"method {method}: there is no {part} {name!r}; {nearest(str(name), known)}")
    cls = known[name]
    public = {_SPELLED.get(argument, argument): argument for argument in cls.parameters}
    if given == ALL or isinstance(given, (list, tuple)):
        given = {public.get(word, word): f"${{..{word}}}" for word in (public if given == ALL else given)}
    for argument in given or {}:
        if argument not in cls.parameters:
            raise ConfigError(
                f"method {method}: {part} {name} has no parameter {argument!r}; {nearest(argument, public)}"
            )
    return {_TARGET: cls.target, **(given or {})}


def _arguments(spec: Any, depth: int) -> Iterator[tuple[int, str, str, str]]:
    """(depth, class, argument, text) of the arguments that are text, of a part and of parts inside it."""
    for argument, value in spec.items() if isinstance(spec, Mapping) else ():
        if isinstance(value, str) and argument != _TARGET:
            yield depth, str(spec.get(_TARGET, "")), str(argument), value
        yield from _arguments(value, depth + 1)

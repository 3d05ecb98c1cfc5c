"""Configuration nodes of methods as plain Python values: read from `conf/method`, resolved for a reading, written to rows.

A node holds a method's parameters, parts that refer to the parameters by interpolation, `released` (parameters that the
paper's released code sets differently), and `later` (parameters added after rows of the method were stored). A reading is
`paper` or `released`. The command line and the Python API share this code, so a method has the same parameters in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mmkv_bench.config.files import content, options
from mmkv_bench.config.schema import READINGS
from mmkv_bench.errors import ConfigError, nearest

PARTS = ("scorer", "allocator", "selector", "reducer")
DECODING = "decoding"
"""The optional fifth part: what happens to the kept entries while the answer is decoded."""
CALIBRATION = "calibration"
"""Parameter of parts that are built with measurements of a model."""

_NOT_PARAMETERS = ("base", "reading", "released", "later", "about", DECODING, *PARTS)
_REFERENCE = re.compile(r"\$\{(\.+)([\w.]+)\}")


def flat_parameters(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a node that users may override, with interpolations unresolved."""
    return {key: value for key, value in node.items() if key not in _NOT_PARAMETERS}


def read(name: str) -> dict[str, Any]:
    """Return the node of a method's file, with its interpolations unresolved. Raises ConfigError: there is no such method."""
    if name not in options("method"):
        raise ConfigError(f"unknown method {name!r}; {nearest(name, options('method'))}")
    return content("method", name)


# ---------------------------------------------------------------- under a reading
def under_reading(
    name: str, node: Mapping[str, Any], reading: str, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the effective node of a method: values of the reading applied, interpolations resolved.

    Args:
        name: the method's name, for messages.
        reading: `paper` or `released`.
        defaults: the node without the user's overrides. If given, integers for float parameters become floats (so that 3
            and 3.0 give the same hash), and a parameter to which the user gives another value than `released` is refused.

    Raises:
        ConfigError: unknown reading, a `released` key that the node lacks, an interpolation without a target.
    """
    if reading not in READINGS:
        raise ConfigError(f"reading={reading!r} of method {name} is unknown; {nearest(str(reading), READINGS)}")
    effective: dict[str, Any] = _plain_copy(node)
    if defaults is not None:
        for key, default in flat_parameters(defaults).items():
            value = effective.get(key)
            if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
                effective[key] = float(value)
    for key, value in (effective.get("released") or {}).items() if reading == "released" else ():
        _release(name, effective, key, value, defaults)
    return _resolve(name, effective)


def _release(name: str, node: dict[str, Any], key: str, value: Any, defaults: Mapping[str, Any] | None) -> None:
    """Set one parameter of a node, in place, to the released code's value. key: `<parameter>` or `<part>.<parameter>`."""
    *path, leaf = key.split(".")
    holder: Any = node
    for step in path:
        holder = holder.get(step) if isinstance(holder, Mapping) else None
    if not isinstance(holder, dict) or leaf not in holder:
        raise ConfigError(
            f"method {name}: `released` sets {key!r}, which is not a parameter of the method; allowed: "
            f"{', '.join(flat_parameters(node))}; correct the method's file in conf/method"
        )
    overridden = defaults is not None and key in defaults and node[key] != defaults[key]
    if overridden and node[key] != value:
        raise ConfigError(
            f"methods.{name}.{key}={node[key]} has no effect, because reading=released sets {key}={value}; "
            f"override methods.{name}.released.{key} instead, or use reading=paper"
        )
    holder[leaf] = value


def _resolve(name: str, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node with every reference `${..key}` replaced by its target.

    One dot stands for the mapping that contains the reference, each further dot for the mapping one level up. References inside
    a target are relative to the target.
    """

    def value(raw: Any, path: tuple[Any, ...], via: tuple[tuple[Any, ...], ...] = ()) -> Any:
        if isinstance(raw, Mapping):
            return {key: value(item, (*path, key), via) for key, item in raw.items()}
        if isinstance(raw, list):
            return [value(item, (*path, i), via) for i, item in enumerate(raw)]
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        match = _REFERENCE.fullmatch(raw)
        if match is None or len(match[1]) > len(path) or path in via:
            raise unresolvable(raw, path)
        target = (*path[: len(path) - len(match[1])], *match[2].split("."))
        item: Any = root
        for step in target:
            if not isinstance(item, Mapping) or step not in item:
                raise unresolvable(raw, path)
            item = item[step]
        return value(item, target, (*via, path))

    def unresolvable(raw: str, path: tuple[Any, ...]) -> ConfigError:
        return ConfigError(
            f"method {name}: {'.'.join(map(str, path))}={raw} refers to nothing; allowed: ${{.<key beside it>}}, "
            "with one more dot for each mapping around it; correct the method's file in conf/method"
        )

    return value(root, ())


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_copy(item) for key, item in value.items()}
    return [_plain_copy(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- in rows
def parameters_json(node: Mapping[str, Any], decoding: str | None = None) -> str:
    """Return a node's parameters as sorted JSON, for the rows' column `parameters`.

    decoding: the decode policy if the user replaced the method's own; otherwise None.
    """
    policy = {} if decoding is None else {DECODING: decoding}
    return json.dumps(flat_parameters(node) | policy, sort_keys=True)


def with_checksums(node: Mapping[str, Any], used: Mapping[str, str]) -> dict[str, Any]:
    """Return the node with checksums of its calibration artefacts in place of their paths.

    used: method -> checksum; if empty, the node is unchanged.
    """
    return _without(node, CALIBRATION) | {CALIBRATION: dict(used)} if used else dict(node)


def _without(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _without(item, key) for name, item in value.items() if name != key}
    return [_without(item, key) for item in value] if isinstance(value, list) else value

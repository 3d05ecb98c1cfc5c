"""A method's file in `conf/method` as plain Python values, without a configuration library.

Also what a composed configuration's nodes go through (`build.effective`), so that a method has the same parameters
whoever asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import READINGS, options
from mmkv_bench.errors import ConfigError, nearest

PARTS = ("scorer", "allocator", "selector", "reducer")
DECODING = "decoding"
"""The optional fifth part: what happens to the kept entries while the answer is decoded."""

_NOT_PARAMETERS = ("base", "reading", "released", "about", DECODING, *PARTS)
_REFERENCE = re.compile(r"\$\{(\.+)([\w.]+)\}")


def flat_parameters(node: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that users override, without parts and bookkeeping; interpolations are left as they are."""
    return {key: value for key, value in node.items() if key not in _NOT_PARAMETERS}


def read(name: str) -> dict[str, Any]:
    """A method's file with its parts and parameters, interpolations unresolved.

    Raises:
        ConfigError: there is no such method.
    """
    if name not in options("method"):
        raise ConfigError(f"unknown method {name!r}; {nearest(name, options('method'))}")
    return content("method", name)


def under_reading(
    name: str, node: Mapping[str, Any], reading: str, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A node of plain values as it runs under a reading; see `build.effective`."""
    if reading not in READINGS:
        raise ConfigError(f"reading={reading!r} of method {name} is unknown; {nearest(str(reading), READINGS)}")
    own: dict[str, Any] = _copied(node)
    if defaults is not None:
        for key, default in flat_parameters(defaults).items():
            if isinstance(default, float) and isinstance(own.get(key), int) and not isinstance(own[key], bool):
                own[key] = float(own[key])
    for key, value in (own.get("released") or {}).items() if reading == "released" else ():
        _release(name, own, key, value, defaults)
    return _resolved(name, own)


def _release(name: str, node: dict[str, Any], key: str, value: Any, defaults: Mapping[str, Any] | None) -> None:
    """Set one parameter, `key` or `part.key`, to what the released code has.

    Raises:
        ConfigError: the node does not have it, or the user has set it to something else.
    """
    *path, leaf = key.split(".")
    holder: Any = node
    for step in path:
        holder = holder.get(step) if isinstance(holder, Mapping) else None
    if not isinstance(holder, dict) or leaf not in holder:
        raise ConfigError(
            f"method {name}: `released` sets {key!r}, which the method does not have; "
            f"allowed: {', '.join(flat_parameters(node))}; correct its file in conf/method"
        )
    own = defaults is not None and key in defaults and node[key] != defaults[key]
    if own and node[key] != value:
        raise ConfigError(
            f"methods.{name}.{key}={node[key]} has no effect under reading=released, whose code sets {key}={value}; "
            f"override methods.{name}.released.{key} instead, or use reading=paper"
        )
    holder[leaf] = value


def _resolved(name: str, root: Mapping[str, Any]) -> dict[str, Any]:
    """Every `${..key}` replaced by what it points to: one dot is the mapping that the reference stands in, each further
    one the mapping around it; what it points to is resolved at its own place."""

    def value(raw: Any, path: tuple[Any, ...], via: tuple[tuple[Any, ...], ...] = ()) -> Any:
        if isinstance(raw, Mapping):
            return {key: value(item, (*path, key), via) for key, item in raw.items()}
        if isinstance(raw, list):
            return [value(item, (*path, i), via) for i, item in enumerate(raw)]
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        found = _REFERENCE.fullmatch(raw)
        if found is None or len(found[1]) > len(path) or path in via:
            raise refused(raw, path)
        target = (*path[: len(path) - len(found[1])], *found[2].split("."))
        item: Any = root
        for step in target:
            if not isinstance(item, Mapping) or step not in item:
                raise refused(raw, path)
            item = item[step]
        return value(item, target, (*via, path))

    def refused(raw: str, path: tuple[Any, ...]) -> ConfigError:
        return ConfigError(
            f"method {name}: {'.'.join(map(str, path))}={raw} leads nowhere; allowed: ${{.<key beside it>}}, with one more "
            "dot for each mapping around it; correct its file in conf/method"
        )

    return value(root, ())


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value

"""`${...}` in a composed configuration: resolved once, in one place, or refused with one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import Container

_RELATIVE = "${."


def settle(config: Container) -> None:
    """Replace every interpolation by its value.

    Relative ones (`${.window}`) are looked up and left: parts of a method refer to its parameters, which its reading
    still changes. Inside a part of a variant they are not looked up either, since they refer to keys of its base;
    `methods.node.under_reading` refuses them when the two are one.

    Raises:
        ConfigError: an interpolation that leads nowhere, at a value of another type or to itself, or a key without a
            value (`???`).
    """
    from omegaconf import OmegaConf

    for path, holder, key in _leaves(config, ()):
        raw = OmegaConf.to_container(holder, resolve=False)[key]
        relative = isinstance(raw, str) and _RELATIVE in raw
        if relative and path[0] == "variants" and len(path) > 3:
            continue
        value = _value(".".join(map(str, path)), raw, holder, key)
        if not relative and not OmegaConf.is_config(value):
            holder[key] = value


def _leaves(node: Container, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Container, Any]]:
    """(path, container, key) of all interpolations and missing values below a node."""
    from omegaconf import OmegaConf

    for key in list(node) if OmegaConf.is_dict(node) else range(len(node)):
        if OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key):
            yield (*path, key), node, key
        elif OmegaConf.is_config(child := node[key]):
            yield from _leaves(child, (*path, key))


def _value(name: str, raw: Any, holder: Container, key: Any) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = holder[key]
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        why = "it refers to itself" if isinstance(error, RecursionError) else str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name}={raw} has no value ({why.rstrip('.')}); allowed: a value, ${{<key of the configuration>}}, or "
            "${oc.env:<variable that is set>}; give one of these"
        ) from None
    return value

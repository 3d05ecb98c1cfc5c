"""Conversion of Hydra's composition to a `RunConfig`, and the schema into which Hydra composes.

Only this file and `compose.py` use `DictConfig`. All other code takes the frozen dataclasses of `schema.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass
from dataclasses import field as new_field
from functools import cache
from typing import Any, get_origin, get_type_hints

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from mmkv_bench.config.schema import RunConfig, as_list, scalars
from mmkv_bench.errors import ConfigError

_UNRESOLVED = ("methods", "variants")
"""Keys whose relative interpolations are kept, because a reading changes the parameters that they refer to."""
_NOT_COMPOSED = "resolved"


def run_config(composed: DictConfig) -> RunConfig:
    """Convert Hydra's composition to a `RunConfig`. Absolute interpolations must be resolved."""
    resolved = _plain_values(composed)
    unresolved = OmegaConf.to_container(composed, resolve=False)
    values = _values(RunConfig, {**resolved, **{key: unresolved[key] for key in _UNRESOLVED}})
    return RunConfig(**values, resolved=resolved)


def stored_config(stored: Mapping[str, Any]) -> RunConfig:
    """Convert the configuration in a stored row to a `RunConfig`. Keys that are newer than the row get their defaults."""
    return run_config(OmegaConf.merge(OmegaConf.structured(composed_schema()), stored))


def _plain_values(composed: DictConfig) -> dict[str, Any]:
    """Return all keys of a composition as plain values.

    If an interpolation refers to a missing key, all interpolations inside `variants` are kept: the key may belong to a
    variant's base.
    """
    try:
        return OmegaConf.to_container(composed, resolve=True)
    except InterpolationKeyError:
        values = {
            key: OmegaConf.to_container(composed[key], resolve=key != "variants")
            for key in composed
            if OmegaConf.is_config(composed[key])
        }
        return {key: values.get(key, composed[key]) for key in composed}


def _values(schema: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` as keyword arguments of the dataclass `schema`, with tuples for tuple fields."""
    field_types, arguments = get_type_hints(schema), dict[str, Any]()
    for one in fields(schema):
        if one.name == _NOT_COMPOSED:
            continue
        field_type, value = field_types[one.name], values[one.name]
        if is_dataclass(field_type):
            arguments[one.name] = field_type(**_values(field_type, value))  # type: ignore[operator]
        elif _takes_list(field_type) and value is not None:
            arguments[one.name] = tuple(as_list(value))
        else:
            arguments[one.name] = value
    return arguments


def _takes_list(declared: Any) -> bool:
    return tuple in (get_origin(declared), *(get_origin(kind) for kind in getattr(declared, "__args__", ())))


@cache
def composed_schema(schema: type = RunConfig) -> type:
    """Return a mutable dataclass with the keys of `schema`, into which Hydra can compose.

    A type that Hydra cannot express (a value or a list, several types) becomes `Any`.
    """
    field_types = get_type_hints(schema)
    composed_fields = [
        (one.name, *_hydra_field(one, field_types[one.name])) for one in fields(schema) if one.name != _NOT_COMPOSED
    ]
    return make_dataclass(schema.__name__, composed_fields)


def _hydra_field(one: Field[Any], declared: Any) -> tuple[Any, Any]:
    """Return type and default of a field of `composed_schema`. declared: the field's type in `schema.py`."""
    if isinstance(declared, type) and is_dataclass(declared):
        nested_schema = composed_schema(declared)
        return nested_schema, new_field(default_factory=nested_schema)
    if one.default_factory is not MISSING:
        return dict[str, Any], new_field(default_factory=one.default_factory)
    if isinstance(one.default, tuple):
        first_default, *other_defaults = one.default or (None,)
        if one.default and not other_defaults:
            return Any, first_default
        values = one.default
        return Any, new_field(default_factory=lambda: list(values))
    return (Any if scalars(declared) is None else declared), one.default


_RELATIVE = "${."


def settle(config: Container) -> None:
    """Replace every absolute interpolation in a composition by its value, and check the relative ones (`${.window}`).

    Relative interpolations stay, because a method's reading (the paper's text or the released code) may change the
    parameters that they name. Those inside a variant's parts are not checked here but by `methods.node.under_reading`,
    once variant and base are merged.

    Raises:
        ConfigError: an interpolation to a missing key, to a value of another type or to itself, or a key without a
            value (`???`).
    """
    for path, holder, key in _leaves(config, ()):
        raw_value = OmegaConf.to_container(holder, resolve=False)[key]
        is_relative = isinstance(raw_value, str) and _RELATIVE in raw_value
        if is_relative and path[0] == "variants" and len(path) > 3:
            continue
        value = _value(".".join(map(str, path)), raw_value, holder, key)
        if not is_relative and not OmegaConf.is_config(value):
            holder[key] = value


def _leaves(node: Container, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Container, Any]]:
    """Yield every interpolation and missing value below a node, as (path, container, key in the container)."""
    for key in list(node) if OmegaConf.is_dict(node) else range(len(node)):
        if OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key):
            yield (*path, key), node, key
        elif OmegaConf.is_config(child := node[key]):
            yield from _leaves(child, (*path, key))


def _value(name: str, raw: Any, holder: Container, key: Any) -> Any:
    try:
        value = holder[key]
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        reason = "it refers to itself" if isinstance(error, RecursionError) else str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name}={raw} has no value ({reason.rstrip('.')}); allowed: a value, ${{<key of the configuration>}}, "
            "or ${oc.env:<variable that is set>}; give one of these"
        ) from None
    return value

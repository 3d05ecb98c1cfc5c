"""Conversion of what Hydra composed into a `RunConfig`, and the schema that Hydra composes into.

`DictConfig` stands here and in `compose.py` only: everything else takes the frozen dataclasses of `schema.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass
from dataclasses import field as new_field
from functools import cache
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from mmkv_bench.config.schema import RunConfig, as_list, scalars

if TYPE_CHECKING:
    from omegaconf import DictConfig

_UNRESOLVED = ("methods", "variants")
"""Keys whose relative interpolations stay: a reading changes the parameters that they refer to."""
_NOT_COMPOSED = "resolved"


def run_config(composed: DictConfig) -> RunConfig:
    """Convert a composed configuration, its absolute interpolations settled."""
    from omegaconf import OmegaConf

    resolved = _resolved(composed)
    raw = OmegaConf.to_container(composed, resolve=False)
    values = _values(RunConfig, {**resolved, **{key: raw[key] for key in _UNRESOLVED}})
    return RunConfig(**values, resolved=resolved)


def stored_config(stored: Mapping[str, Any]) -> RunConfig:
    """Convert a configuration that rows hold; keys that came after them get their defaults."""
    from omegaconf import OmegaConf

    return run_config(OmegaConf.merge(OmegaConf.structured(composed_schema()), stored))


def _resolved(composed: DictConfig) -> dict[str, Any]:
    """All keys as plain values. A variant's references are to keys of its base, so those that lead nowhere here stay."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError

    try:
        return OmegaConf.to_container(composed, resolve=True)
    except InterpolationKeyError:
        found = {
            key: OmegaConf.to_container(composed[key], resolve=key != "variants")
            for key in composed
            if OmegaConf.is_config(composed[key])
        }
        return {key: found.get(key, composed[key]) for key in composed}


def _values(schema: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataclass: lists and single values as tuples where it has tuples."""
    types, found = get_type_hints(schema), dict[str, Any]()
    for one in fields(schema):
        if one.name == _NOT_COMPOSED:
            continue
        declared, value = types[one.name], values[one.name]
        if is_dataclass(declared):
            found[one.name] = declared(**_values(declared, value))  # type: ignore[operator]
        elif _several(declared) and value is not None:
            found[one.name] = tuple(as_list(value))
        else:
            found[one.name] = value
    return found


def _several(declared: Any) -> bool:
    """Whether a key takes a value or a list of values."""
    return tuple in (get_origin(declared), *(get_origin(kind) for kind in getattr(declared, "__args__", ())))


@cache
def composed_schema(schema: type = RunConfig) -> type:
    """The schema that Hydra composes into: the same keys, mutable, `Any` where a key takes more than one plain value."""
    types = get_type_hints(schema)
    made = [(one.name, *_composed(one, types[one.name])) for one in fields(schema) if one.name != _NOT_COMPOSED]
    return make_dataclass(schema.__name__, made)


def _composed(one: Field[Any], declared: Any) -> tuple[Any, Any]:
    """Type and default of a key in the schema that Hydra composes into."""
    if isinstance(declared, type) and is_dataclass(declared):
        inner = composed_schema(declared)
        return inner, new_field(default_factory=inner)
    if one.default_factory is not MISSING:
        return dict[str, Any], new_field(default_factory=one.default_factory)
    if isinstance(one.default, tuple):
        first, *others = one.default or (None,)
        if one.default and not others:
            return Any, first
        values = one.default
        return Any, new_field(default_factory=lambda: list(values))
    return (Any if scalars(declared) is None else declared), one.default

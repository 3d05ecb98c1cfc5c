"""Checks of the parameters of scorers, allocators and other parts."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_type_hints

from mmkv_bench.errors import ConfigError, nearest


@cache
def _words(kind: type) -> dict[str, tuple[str, ...]]:
    """Map each `Literal` field of a class to its allowed strings."""
    hints = get_type_hints(kind)
    listed = {field.name: get_args(hints[field.name]) for field in fields(kind)}
    return {name: words for name, words in listed.items() if words and all(isinstance(word, str) for word in words)}


def check_words(part: Any) -> None:
    """Raise ConfigError if a `Literal` field of a part has a string that is not allowed."""
    kind: Any = type(part)
    for name, words in _words(kind).items():
        if getattr(part, name) not in words:
            raise ConfigError(f"{name} is {getattr(part, name)!r}; {nearest(str(getattr(part, name)), words)}")


def check_least(part: Any, least: int, unit: str, *names: str) -> None:
    """Raise ConfigError if one of the named parameters of a part is below `least`. unit: of the parameter, for the message."""
    for name in names:
        if not getattr(part, name) >= least:
            raise ConfigError(f"{name} is {getattr(part, name)}; allowed: {least} or more {unit}".rstrip())


def check_share(part: Any, name: str, whole: str) -> None:
    """Raise ConfigError if parameter `name` of a part is outside of [0, 1]. whole: the whole that it is a share of."""
    if not 0 <= getattr(part, name) <= 1:
        raise ConfigError(f"{name} is {getattr(part, name)}; allowed: a share of {whole}, 0 <= {name} <= 1")

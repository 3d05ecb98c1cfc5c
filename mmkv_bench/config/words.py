"""Settings as the words of a command line that say them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z0-9_./%+-]+", re.IGNORECASE)


def words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line: `{"methods": {"snapkv": {"window": 16}}}` -> `methods.snapkv.window=16`."""
    return [f"{key}={_word(value)}" for key, value in _leaves(settings)]


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(value: Any) -> str:
    """A value in the grammar of overrides, which reads back as the same value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_word, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    doubled = re.sub(r"(\\*)'", r"\1\1\\'", text)  # a quotation mark, and backslashes before one, are escaped
    return "'" + re.sub(r"(\\+)$", r"\1\1", doubled) + "'"

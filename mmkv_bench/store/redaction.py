"""Keeps keys, passwords and where a machine has its folders out of rows and trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"
_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|secret(_?key)?|(auth|access|hf|api)?_?token|pass(word|wd)?|credentials?)$",
    re.IGNORECASE,
)


_FOLDER = re.compile(r"(/|~/).*?([^/]+)/*", re.DOTALL)


def redact(value: Any) -> Any:
    """`value` (nested mappings and lists) with secrets replaced by a mark, and absolute paths by their last part.

    A secret is what stands under a secret's name (`api_key`, `hf_token`, `password`, ...; `max_new_tokens` is none),
    and any text containing the value of an environment variable of such a name, wherever an interpolation put it.
    """
    known = sorted(
        (secret for name, secret in os.environ.items() if _SECRET.search(name) and len(secret) >= 8),
        key=len,
        reverse=True,
    )
    return _redact(value, known)


def _redact(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: REDACTED if isinstance(item, str) and item and _SECRET.search(str(key)) else _redact(item, known)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(item, known) for item in value]
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, REDACTED)
        if (path := _FOLDER.fullmatch(value)) is not None:
            return f".../{path[2]}"
    return value

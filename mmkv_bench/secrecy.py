"""Keeps keys and passwords out of rows, logs and trackers.

A secret is known by where it stands (under a name such as `api_key`) or by its value (an environment variable of such a
name, wherever an interpolation or an error message put it); a value is found in the encodings in which servers and
libraries echo it, too.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "<redacted>"
SHORTEST = 8  # characters; shorter values are words that may stand anywhere
_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|secret(_?key)?|(auth|access|hf|api)?_?token|pass(word|wd)?|credentials?)$",
    re.IGNORECASE,
)


def known_secrets() -> list[str]:
    """Values of the environment variables that have a secret's name."""
    return [value for name, value in os.environ.items() if _NAME.search(name)]


def without_secrets(value: Any, secrets: Iterable[str] | None = None, also: Callable[[str], str] = str) -> Any:
    """`value` (text, or nested mappings and lists) with secrets replaced by `<redacted>`.

    Args:
        secrets: values to look for; None = `known_secrets()`. Those shorter than 8 characters are left.
        also: applied to every text that stands under no secret's name.
    """
    pattern = _pattern(known_secrets() if secrets is None else secrets)

    def hide(inner: Any) -> Any:
        if isinstance(inner, Mapping):
            return {
                key: REDACTED if isinstance(item, str) and item and _NAME.search(str(key)) else hide(item)
                for key, item in inner.items()
            }
        if isinstance(inner, list | tuple):
            return [hide(item) for item in inner]
        if isinstance(inner, str):
            return also(pattern.sub(REDACTED, inner) if pattern else inner)
        return inner

    return hide(value)


def _pattern(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """What matches any form of any secret, the longest first; None without secrets."""
    forms = {form for secret in secrets if len(secret) >= SHORTEST for form in _forms(secret)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _forms(secret: str) -> set[str]:
    """The secret as it is, as JSON, in a URL, in hexadecimal digits, and in both alphabets of base64."""
    raw = secret.encode("utf-8", errors="surrogateescape")
    forms = {secret, json.dumps(secret)[1:-1], raw.hex(), raw.hex().upper()}
    if raw.decode("utf-8", errors="ignore") == secret:
        forms |= {quote(secret, safe=""), quote_plus(secret), quote(secret, safe="").lower()}
    for before in range(3):  # base64 digits depend on what stands before; those that share a byte with it are left out
        first, last = -(-8 * before // 6), 8 * (before + len(raw)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.add(encode(bytes(before) + raw).decode()[first:last])
    return forms

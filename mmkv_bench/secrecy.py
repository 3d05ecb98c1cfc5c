"""Removal of keys and passwords from rows, logs and trackers.

A secret is recognised by its name (such as `api_key`), by its place in an address, or by its value, if an environment
variable with such a name has this value. Values are found in any text, also in the encodings that servers and libraries
echo.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "<redacted>"
SHORTEST = 8  # characters; shorter values are words that may occur anywhere
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?keys?|(access|private|subscription)[_-]?key|secrets?([_-]?key)?|(auth|access|hf|api)?[_-]?token|"
    r"authorization|pass(word|wd|phrase)?|credentials?)$",
    re.IGNORECASE,
)
# Variables are named more freely (JUDGE_KEY, PGPASSWORD, OPENAI_API_KEY_2); PWD alone is a folder.
_SECRET_VARIABLE = re.compile(r"(key|token|secret|pass(word|wd|phrase)?|.pwd|credentials?)(_?\d+)?$", re.IGNORECASE)
# In an address: user:password@ before the host, and parameters such as ?api-key=...
_IN_ADDRESS = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=[?&])((?:[\w-]*[_-])?(?:key|token|secret|password|sig|signature)=)[^&#\s\"']+",
    re.IGNORECASE,
)

_KEY_VALUE_PAIR = re.compile(r"([\w-]+)\s*:\s*([^\s,}\]]+)")  # key: value inside a mapping


def known_secrets() -> list[str]:
    """Return the values of environment variables whose names mark them as secrets."""
    return [value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name) and name.upper() != "OLDPWD"]


def literal_secret(overrides: Iterable[str]) -> str | None:
    """Return the key of the first override (`key=value`) whose value contains a secret in plain text, or None.

    A value with an interpolation is no secret. The caller refuses a secret, because a file of the job would store it.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+~").rpartition(".")[2]
        keys_and_values = [(name, value), *_KEY_VALUE_PAIR.findall(value)]
        if any(_SECRET_NAME.search(one) and text.strip("\"'") and "${" not in text for one, text in keys_and_values):
            return key.lstrip("+~")
        if _IN_ADDRESS.search(value):
            return key.lstrip("+~")
    return None


def without_secrets(value: Any, secrets: Iterable[str] | None = None, also: Callable[[str], str] = str) -> Any:
    """Return `value` (text, or nested mappings and lists) with secrets replaced by `<redacted>`.

    Args:
        secrets: values to look for; None = `known_secrets()`. Values shorter than 8 characters are not replaced.
        also: a function applied to every text whose key is not the name of a secret.
    """
    pattern = _pattern(known_secrets() if secrets is None else secrets)

    def hide(inner: Any) -> Any:
        if isinstance(inner, Mapping):
            return {key: covered(item) if _SECRET_NAME.search(str(key)) else hide(item) for key, item in inner.items()}
        if isinstance(inner, list | tuple):
            return [hide(item) for item in inner]
        if isinstance(inner, str):
            redacted_text = pattern.sub(REDACTED, inner) if pattern else inner
            return also(_IN_ADDRESS.sub(lambda found: f"{found[1] or ''}{REDACTED}", redacted_text))
        return inner

    def covered(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [covered(one) for one in item]
        return REDACTED if isinstance(item, str) and item else hide(item)

    return hide(value)


def _pattern(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """Return a regular expression for any form of any secret, longer forms first; None without secrets."""
    forms = {form for secret in secrets if len(secret) >= SHORTEST for form in _forms(secret)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _forms(secret: str) -> set[str]:
    """Return the encodings in which a secret may occur in text."""
    secret_bytes = secret.encode("utf-8", errors="surrogateescape")
    json_text = json.dumps(secret)[1:-1]
    forms = {
        secret,
        json_text,
        json.dumps(json_text)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        escape(secret),
    }
    forms |= {repr(secret)[1:-1], repr(secret_bytes)[2:-1], secret_bytes.hex(), secret_bytes.hex().upper()}
    if secret_bytes.decode("utf-8", errors="ignore") == secret:
        for form in (quote(secret, safe=""), quote(secret), quote_plus(secret)):
            forms |= {form, re.sub("%..", lambda found: found[0].lower(), form)}
    for before in range(3):  # base64 digits depend on the bytes before; digits shared with those are left out
        first_digit, last_digit = -(-8 * before // 6), 8 * (before + len(secret_bytes)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.add(encode(bytes(before) + secret_bytes).decode()[first_digit:last_digit])
    return forms

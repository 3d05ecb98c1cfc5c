"""The `judge` group of the configuration: its values, and its check before any work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Judge

NOT_JUDGED = "not judged"
"""Prefix of the reason for every metric that lacks an answer of its judge."""


@dataclass(frozen=True)
class JudgeSettings:
    """An endpoint with OpenAI's chat completions, and how to ask it.

    model        id that the endpoint accepts; part of every answer's identity and of the metric rows
    url          base url; `<url>/chat/completions` is asked; part of every answer's identity as `address`
    key_env      environment variable with the key; None sends no key
    timeout_s    of one attempt, from connecting to the last byte of the answer [s]
    retries      further attempts after a timeout, a temporary refusal (408, 409, 429, 5xx) or an unreadable answer
    backoff_s    wait before the first further attempt [s]; doubled for each later one, with jitter
    concurrency  number of concurrent questions
    temperature  of the judge's sampling; None keeps the scorer's value
    cache        folder of the answers; None keeps none
    """

    model: str
    url: str
    key_env: str | None = None
    timeout_s: float = 60.0
    retries: int = 4
    backoff_s: float = 1.0
    concurrency: int = 8
    temperature: float | None = None
    cache: Path | None = None

    @property
    def address(self) -> str:
        """Return the address without user name, password and query, which may contain a key. Equal model ids at different
        addresses are different models."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2].lower()
        return f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/chat/completions')}/chat/completions"

    def key(self) -> str | None:
        """Return the key from the environment. It is stored nowhere else."""
        return (os.environ.get(self.key_env) or "").strip() or None if self.key_env else None


def check_judge(judge: Judge) -> None:
    """Raise ConfigError naming the key with an impossible value."""
    if judge.kind == "none" and (judge.url is not None or judge.model is not None):
        raise ConfigError(
            "judge.url or judge.model is set, but judge=none asks no judge; allowed: judge=local or "
            "judge=openai; choose one, or drop the key"
        )
    if "@" in str(judge.url or "").partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "judge.url contains a user's name or password, which rows would store; give an address without them, put "
            "the key into an environment variable, and name that variable with judge.key_env"
        )


def not_judged(row: Mapping[str, Any]) -> bool:
    """Tell whether a `metrics` row lacks answers of a judge."""
    return str(row["lmms_eval_reason"] or "").startswith(NOT_JUDGED)

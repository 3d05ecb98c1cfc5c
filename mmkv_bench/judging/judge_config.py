"""The `judge` group of the configuration: its check before any work, and its values."""

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
"""Begins the reason of every metric that lacks an answer of its judge."""


@dataclass(frozen=True)
class JudgeSettings:
    """An endpoint that speaks OpenAI's chat completions.

    model        id that the endpoint knows; part of every answer's identity and of the metric rows
    url          base url; `<url>/chat/completions` is asked; part of every answer's identity as `address`
    key_env      environment variable that holds the key; None sends none
    timeout_s    of one attempt, from connecting to the last byte of the answer [s]
    retries      further attempts after a timeout, a refusal for now (408, 409, 429, 5xx) or an unreadable answer
    backoff_s    wait before the first further attempt [s]; doubled for each one after, with jitter
    concurrency  questions under way at a time
    temperature  of the judge's sampling; None leaves what the scorer asks for
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
        """The address without a user's name, password or query, which may hold a key: `default` or any other id is
        another model at another address."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2].lower()
        return f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/chat/completions')}/chat/completions"

    def key(self) -> str | None:
        """The key, from the environment: it is held nowhere else."""
        return (os.environ.get(self.key_env) or "").strip() or None if self.key_env else None


def check_judge(judge: Judge) -> None:
    """Raises ConfigError naming the key that cannot be meant."""
    if judge.kind == "none" and (judge.url is not None or judge.model is not None):
        raise ConfigError(
            "judge.url or judge.model is set and judge=none asks nobody; allowed: judge=local or judge=openai; choose "
            "one, or drop the key"
        )
    if "@" in str(judge.url or "").partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "judge.url holds a user's name or password, which rows would keep; allowed: an address without them; put the "
            "key into an environment variable and name it with judge.key_env"
        )


def not_judged(row: Mapping[str, Any]) -> bool:
    """True where a `metrics` row lacks answers of a judge."""
    return str(row["lmms_eval_reason"] or "").startswith(NOT_JUDGED)

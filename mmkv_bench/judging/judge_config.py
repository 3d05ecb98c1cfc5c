"""How a judge is asked: the `judge` group of the configuration as plain values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


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
        """What is asked, without a user's name, password or query, which may hold a key: `default` or any other id is
        another model at another address."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2].lower()
        return f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/chat/completions')}/chat/completions"

    def key(self) -> str | None:
        """The key, from the environment: it is held nowhere else."""
        return (os.environ.get(self.key_env) or "").strip() or None if self.key_env else None

"""An endpoint with OpenAI's chat completions: questions asked concurrently, each with several attempts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mmkv_bench.judging.questions import Question
from mmkv_bench.secrecy import without_secrets

if TYPE_CHECKING:
    import httpx

    from mmkv_bench.config.schema import Judge

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PASSING = {408, 409, 425, 429}  # and 5xx: the same request may succeed later
OF_THE_QUESTION = {400, 413, 422}  # only this question is refused
LONGEST = 8 << 20  # maximum bytes of a reply
EXCERPT = 160  # maximum quoted characters of a server's message
LONGEST_WAIT_S = 120.0  # an endpoint that demands a longer wait gets no further attempt
LOST_IN_A_ROW = 3  # unanswered questions in a row after which an endpoint that has answered counts as gone
_JITTER = random.SystemRandom()  # scorers seed the shared generator


class Failure(Exception):
    """An attempt without an answer.

    passes: another attempt may succeed.
    wait_s: wait demanded by the endpoint before another attempt [s].
    alone: the failure concerns only this question.
    """

    def __init__(self, reason: str, passes: bool = False, wait_s: float = 0.0, alone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.passes, self.wait_s, self.alone = reason, passes, wait_s, alone


@dataclass(frozen=True)
class Reply:
    """An answer. text: its text. served: the model's name as the endpoint states it."""

    text: str
    served: str | None


Keep = Callable[[Question, Reply], None]


def address_of(url: str) -> str:
    """Return the address that is asked, without user name, password and query, which may contain a key. Equal model ids at
    different addresses are different models."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/chat/completions')}/chat/completions"


class Endpoint:
    """Client of the endpoint `<url>/chat/completions`. The key never appears in a message or reply.

    gone: the reason why the client has stopped asking, or None. It stops if the endpoint refuses the key or the model, if the
    endpoint never answered and one question has no attempts left, or if `LOST_IN_A_ROW` questions in a row failed. Unreadable
    answers and refusals of one question do not count.
    """

    def __init__(self, settings: Judge) -> None:
        self.settings, self.url = settings, str(settings.url)
        self.address = address_of(self.url)
        self.gone: str | None = None
        self._sleep = asyncio.sleep
        self._answered, self._lost = False, 0

    def ask_all(self, questions: Mapping[str, Question], keep: Keep) -> dict[str, Reply | Failure]:
        """Ask questions. Return name to reply or failure. `keep` is called with each reply as it arrives.

        Until the endpoint has answered once, questions are asked one by one; then `concurrency` at a time. An interrupt, or an
        exception of `keep`, cancels running requests.
        """
        from anyio.from_thread import start_blocking_portal

        # The loop of another thread, because a notebook has a loop in this thread.
        with start_blocking_portal() as portal:
            return portal.call(self._ask_all, questions, keep)

    async def _ask_all(self, questions: Mapping[str, Question], keep: Keep) -> dict[str, Reply | Failure]:
        import httpx

        outcomes: dict[str, Reply | Failure] = {}
        limit = asyncio.Semaphore(self.settings.concurrency)
        proxied = urlsplit(self.url).hostname not in LOOPBACK  # no proxy between a machine and itself
        async with httpx.AsyncClient(timeout=self.settings.timeout_s, trust_env=proxied) as client:

            async def ask(name: str) -> None:
                async with limit:
                    outcomes[name] = await self._attempts(client, questions[name], keep)

            waiting = list(questions)
            while waiting and not self._answered and self.gone is None:
                await ask(waiting.pop(0))
            try:
                async with asyncio.TaskGroup() as group:
                    for name in waiting:
                        group.create_task(ask(name))
            except BaseExceptionGroup as problems:
                raise problems.exceptions[0] from None
        return outcomes

    async def _attempts(self, client: httpx.AsyncClient, question: Question, keep: Keep) -> Reply | Failure:
        failure = Failure(self.gone or "not asked")
        for attempt in range(1 + self.settings.retries):
            if self.gone is not None:
                return Failure(self.gone)
            try:
                reply = await self._ask(client, question)
            except Failure as caught:
                failure = caught
            else:
                keep(question, reply)
                self._answered, self._lost = True, 0
                return reply
            if not failure.passes or failure.wait_s > LONGEST_WAIT_S:
                break
            if attempt < self.settings.retries and not failure.alone:
                backoff = min(LONGEST_WAIT_S, self.settings.backoff_s * 2**attempt) * _JITTER.uniform(0.5, 1.0)
                await self._sleep(max(backoff, failure.wait_s))
        if failure.alone:  # the endpoint works, but not for this question
            self._answered, self._lost = True, 0
            return failure
        self._lost += 1
        if not failure.passes or not self._answered or self._lost >= LOST_IN_A_ROW:
            self.gone = self.gone or failure.reason
        return failure

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> Reply:
        """Make one attempt. Raises Failure."""
        import httpx

        settings, key = self.settings, self._key()
        body = {
            "model": settings.model,
            "messages": list(question.messages),
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
        }
        url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = b""
        try:  # redirects are not followed, so that only the configured endpoint gets the key
            async with (
                asyncio.timeout(settings.timeout_s),
                client.stream("POST", url, json=body, headers=headers) as response,
            ):
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > LONGEST:
                        raise Failure(f"{self.address} replied with more than {LONGEST >> 20} MiB", passes=True)
        except (TimeoutError, httpx.TimeoutException):
            raise Failure(f"{self.address} did not answer within {settings.timeout_s:g} s", passes=True) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            invalid = isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol)  # other attempts would fail too
            what = "cannot be asked" if invalid else "cannot be reached or breaks off"
            raise Failure(f"{self.address} {what} ({type(error).__name__})", passes=not invalid) from None
        text = data.decode("utf-8", errors="replace")
        if response.status_code != 200:
            raise self._refusal(response.status_code, response.headers.get("Retry-After", ""), text)
        return self._reply(text, question)

    def _reply(self, data: str, question: Question) -> Reply:
        try:
            body = json.loads(data)
            text, served = body["choices"][0]["message"]["content"], body.get("model")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            excerpt = self._hide(data)[:EXCERPT]
            reason = f"{self.address} replied with what is no chat completion: {excerpt!r}"
            raise Failure(reason, passes=True) from None
        text = self._hide(text) if isinstance(text, str) else ""
        if not question.readable(text):
            reason = f"its answer is not of the form that the scorer reads: {text[:EXCERPT]!r}"
            raise Failure(reason, passes=True, alone=True)
        return Reply(text, self._hide(served) if isinstance(served, str) else None)

    def _refusal(self, code: int, retry_after: str, text: str) -> Failure:
        if code in (401, 403):
            name = self.settings.key_env
            key = f"the key in {name}" if name and self._key() else "a request without a key (judge.key_env)"
            return Failure(f"{self.address} refuses {key} ({code})")
        message = f"{self.address} answers {code}: {self._hide(text)[:EXCERPT]!r}"
        if code in PASSING or code >= 500:
            return Failure(message, passes=True, wait_s=_retry_after(retry_after))
        return Failure(message, alone=code in OF_THE_QUESTION)

    def _hide(self, text: str) -> str:
        """Return the text without the key in any encoding. Placeholders such as `EMPTY` are not secret and may be words of an
        answer."""
        key = self._stated_key()
        return without_secrets(text, [key]) if key else text

    def _stated_key(self) -> str | None:
        """Return the key from the environment. It is stored nowhere else."""
        name = self.settings.key_env
        return (os.environ.get(name) or "").strip() or None if name else None

    def _key(self) -> str | None:
        key, name = self._stated_key(), self.settings.key_env
        if name and name == "OPENAI_API_KEY" and key is None:
            raise Failure(f"{name} is not set; set it to the judge's key")
        if key and not (key.isascii() and key.isprintable()):
            raise Failure(f"the value of {name} is not a key: it has characters that are not allowed in a header")
        return key


def _retry_after(value: str) -> float:
    """Return the seconds of a Retry-After header, given as a number or a date; 0 if it is missing or invalid."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return 0.0

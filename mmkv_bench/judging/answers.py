"""Answers of a judge to this run's scorers: an endpoint that is asked, and the cache of earlier answers.

Scorers ask one question after another. Some wait only 30 s for an answer; without one they sleep, ask again and then score 0.
So no scorer ever waits for the judge. A pass through the scorer (`ScoringPass`) collects the questions without an answer.
Between two passes `JudgeAnswers.fetch` asks them concurrently, each with several attempts. Questions that depend on answers come
in later passes. A question without an answer in the last pass is `not judged`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.judging.questions import JudgeError, Question
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
    """Return the address of a judge's url, without user name, password and query, which may contain a key.

    Equal model ids at different addresses are different models.
    """
    url_parts = urlsplit(url)
    host = url_parts.netloc.rpartition("@")[2].lower()
    return f"{url_parts.scheme}://{host}{url_parts.path.rstrip('/').removesuffix('/chat/completions')}/chat/completions"


class Endpoint:
    """Client of the endpoint `<url>/chat/completions`. The key never appears in a message or reply.

    gone: the reason why the client has stopped asking, or None. It stops if the endpoint refuses the key or the model,
    if the endpoint never answered and one question has no attempts left, or if `LOST_IN_A_ROW` questions in a row
    failed. Unreadable answers and refusals of one question do not count as failures.
    """

    def __init__(self, settings: Judge) -> None:
        self.settings, self.url = settings, str(settings.url)
        self.address = address_of(self.url)
        self.gone: str | None = None
        self._sleep = asyncio.sleep
        self._answered, self._lost = False, 0

    def ask_all(self, questions: Mapping[str, Question], keep: Keep) -> dict[str, Reply | Failure]:
        """Ask the judge several questions. Return name of the question -> reply or failure.

        Until the endpoint has answered once, questions are asked one by one; then `concurrency` at a time. An interrupt, or an
        exception of `keep`, cancels running requests.

        keep: function that is called with each reply as it arrives.
        """
        from anyio.from_thread import start_blocking_portal

        # The loop of another thread, because a notebook has a loop in this thread.
        with start_blocking_portal() as portal:
            return portal.call(self._ask_all, questions, keep)

    async def _ask_all(self, questions: Mapping[str, Question], keep: Keep) -> dict[str, Reply | Failure]:
        import httpx

        outcomes: dict[str, Reply | Failure] = {}
        semaphore = asyncio.Semaphore(self.settings.concurrency)
        uses_proxy = urlsplit(self.url).hostname not in LOOPBACK  # no proxy between a machine and itself
        async with httpx.AsyncClient(timeout=self.settings.timeout_s, trust_env=uses_proxy) as client:

            async def ask(name: str) -> None:
                async with semaphore:
                    outcomes[name] = await self._attempts(client, questions[name], keep)

            unanswered = list(questions)
            while unanswered and not self._answered and self.gone is None:
                await ask(unanswered.pop(0))
            try:
                async with asyncio.TaskGroup() as group:
                    for name in unanswered:
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
        """Send a question once and return the reply. Raises Failure without a usable reply."""
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
            is_invalid_url = isinstance(
                error, httpx.InvalidURL | httpx.UnsupportedProtocol
            )  # other attempts would fail too
            failure_text = "cannot be asked" if is_invalid_url else "cannot be reached or breaks off"
            raise Failure(
                f"{self.address} {failure_text} ({type(error).__name__})", passes=not is_invalid_url
            ) from None
        text = data.decode("utf-8", errors="replace")
        if response.status_code != 200:
            raise self._refusal(response.status_code, response.headers.get("Retry-After", ""), text)
        return self._reply(text, question)

    def _reply(self, data: str, question: Question) -> Reply:
        try:
            body = json.loads(data)
            text, served_model = body["choices"][0]["message"]["content"], body.get("model")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            excerpt = self._hide(data)[:EXCERPT]
            reason = f"{self.address} replied with what is no chat completion: {excerpt!r}"
            raise Failure(reason, passes=True) from None
        text = self._hide(text) if isinstance(text, str) else ""
        if not question.readable(text):
            reason = f"its answer is not of the form that the scorer reads: {text[:EXCERPT]!r}"
            raise Failure(reason, passes=True, alone=True)
        return Reply(text, self._hide(served_model) if isinstance(served_model, str) else None)

    def _refusal(self, code: int, retry_after: str, text: str) -> Failure:
        if code in (401, 403):
            key_variable = self.settings.key_env
            key_text = (
                f"the key in {key_variable}"
                if key_variable and self._key()
                else "a request without a key (judge.key_env)"
            )
            return Failure(f"{self.address} refuses {key_text} ({code})")
        message = f"{self.address} answers {code}: {self._hide(text)[:EXCERPT]!r}"
        if code in PASSING or code >= 500:
            return Failure(message, passes=True, wait_s=_retry_after(retry_after))
        return Failure(message, alone=code in OF_THE_QUESTION)

    def _hide(self, text: str) -> str:
        """Remove the key in every encoding from a text. Placeholder keys (`EMPTY`) stay, because they may be words
        of an answer."""
        key = self._stated_key()
        return without_secrets(text, [key]) if key else text

    def _stated_key(self) -> str | None:
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
    """Return the seconds of an HTTP Retry-After header, given as a number or a date; 0 if it is missing or invalid."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return 0.0


NOT_JUDGED = "not judged"
"""Prefix of the reason for every metric that lacks an answer of its judge."""
CHECKSUM = "sha256"
"""Key of the checksum of a file's other keys."""


def _checksum(record: Mapping[str, Any]) -> str:
    checked_fields = {name: value for name, value in record.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(checked_fields, sort_keys=True, default=dict).encode()).hexdigest()[:16]


class AnswerCache:
    """Answers in files `<folder>/<first two digits>/<digest>.json`, complete or absent. Several processes may share the
    folder.

    address: address of the endpoint that gave the answers (`address_of`).
    """

    def __init__(self, folder: Path, model: str, address: str) -> None:
        self.folder = folder.expanduser().absolute()  # scoring changes the working folder
        self.model, self.address = model, address

    def get(self, question: Question) -> str | None:
        """Return the cached answer to a question; None without a usable one.

        A file is unusable if it cannot be read or fails its checksum (older files have none), or if the scorer cannot
        read the answer.
        """
        try:
            record = json.loads(self._file(question).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict) or record.get(CHECKSUM, "") not in ("", _checksum(record)):
            return None
        answer = record.get("answer")
        return answer if isinstance(answer, str) and question.readable(answer) else None

    def put(self, question: Question, reply: Reply) -> None:
        """Store an answer with its question. Raises StoreError if the folder cannot be written."""
        file = self._file(question)
        record: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "answer": reply.text,
            "served_model": reply.served,
        }
        record[CHECKSUM] = _checksum(record)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as staged:
                json.dump(record, staged, indent=1, sort_keys=True, default=dict)
            os.replace(name, file)
        except OSError as error:
            raise StoreError(
                f"the judge's answers cannot be written to {self.folder} ({error.strerror}); give a writable "
                "folder: judge.cache=<folder>"
            ) from None

    def _file(self, question: Question) -> Path:
        digest = question.digest(self.model, self.address)
        return self.folder / digest[:2] / f"{digest}.json"


class JudgeAnswers:
    """All questions that scorers of a run ask the judge, with answers and failures.

    settings: the judge, with its model and url; None if the run has none. Without `cache` the answers are not kept.

    counts: key `asked` -> number of questions that the judge answered, `cached` -> answered from the cache, `failed` -> without
    an answer. Each question counts once.
    """

    def __init__(self, settings: Judge | None = None) -> None:
        self.settings = settings
        self.model = str(settings.model) if settings else None
        self.counts: Counter[str] = Counter()
        self._endpoint = Endpoint(settings) if settings else None
        self._cache: AnswerCache | None = None
        if settings is not None and settings.cache is not None:
            self._cache = AnswerCache(Path(settings.cache), str(settings.model), address_of(str(settings.url)))
        self._answers: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._pending: dict[str, Question] = {}
        self._lock = threading.Lock()

    @property
    def gone(self) -> str | None:
        """Reason why no more questions are sent to the judge's endpoint; None while questions may be sent."""
        return self._endpoint.gone if self._endpoint else None

    def as_asked(self, question: Question) -> Question:
        temperature = self.settings.temperature if self.settings else None
        return question if temperature is None else replace(question, temperature=float(temperature))

    def look_up(self, question: Question) -> str:
        """Return the stored answer to a question.

        Raises:
            JudgeError: there is no answer. The next `fetch` asks the question, unless there is no judge or the question
                failed before.
        """
        if self._endpoint is None:
            raise JudgeError("no judge was asked (judge=none)")
        digest = question.digest(str(self.model), self._endpoint.address)
        with self._lock:
            if digest in self._answers and question.readable(self._answers[digest]):
                return self._answers[digest]
            if digest in self._failures:
                raise JudgeError(self._failures[digest])
            cached = self._cache.get(question) if self._cache else None
            if cached is not None:
                self.counts["cached"] += 1
                return self._answers.setdefault(digest, cached)
            self._pending[digest] = question
        raise JudgeError("not asked yet")

    def fetch(self) -> int:
        """Ask the judge all noted questions, and return their number."""
        if not self._pending or self._endpoint is None:  # without a judge no question waits
            return 0
        outcomes = self._endpoint.ask_all(self._pending, self._keep)
        self._pending = {}
        answers = {digest: outcome.text for digest, outcome in outcomes.items() if isinstance(outcome, Reply)}
        failures = {digest: outcome.reason for digest, outcome in outcomes.items() if not isinstance(outcome, Reply)}
        self._answers |= answers
        self._failures |= failures
        self.counts.update({"asked": len(answers), "failed": len(failures)})
        return len(outcomes)

    def _keep(self, question: Question, reply: Reply) -> None:
        if self._cache:
            self._cache.put(question, reply)

    def summary(self, metrics: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a text on the run's questions to the judge and on metrics that are not judged; None without either.

        metrics: the `metrics` rows of the run's cells.
        """
        lines = []
        counts, unjudged = self.counts, [row for row in metrics if not_judged(row)]
        if self.settings is not None and counts:
            cached = f"{counts['cached']} answers from {self.settings.cache}"
            reason = self.gone or next(iter(self._failures.values()), None)
            failed_text = f", {counts['failed']} questions without an answer ({reason})" if counts["failed"] else ""
            lines.append(f"judge {self.model}: {counts['asked']} answers, {cached}{failed_text}")
        earlier_judges = sorted({row["judge"] for row in metrics if row["judge"] not in (None, self.model)})
        if self.settings is not None and earlier_judges:
            lines.append(
                f"scores of {', '.join(earlier_judges)} are kept where {self.model} did not answer all questions of a metric"
            )
        if unjudged:
            names = ", ".join(sorted({f"{row['dataset']} {row['metric']}" for row in unjudged}))
            cells = len({row["cell"] for row in unjudged})
            lines.append(
                f"not judged: {names} ({cells} cells); the same command with stage=score and an answering judge "
                "(judge=openai, or judge=local judge.url=<base url> judge.model=<id>) judges them"
            )
        return "\n".join(lines) or None


def not_judged(row: Mapping[str, Any]) -> bool:
    """Return True if a `metrics` row lacks answers of a judge."""
    return str(row["lmms_eval_reason"] or "").startswith(NOT_JUDGED)


def check_judge(judge: Judge) -> None:
    """Raise ConfigError if settings of a judge contradict each other or its address has a user name or password."""
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


def judge_answers(judge: Judge, root: Path) -> JudgeAnswers:
    """Return the store of a judge's answers for a run whose rows are in `root`. Nothing is asked or written yet.

    Raises:
        ConfigError: the judge has no model or no address.
    """
    if judge.kind == "none":
        return JudgeAnswers()
    if not judge.model:
        raise ConfigError(
            f"judge={judge.kind} has no model; give judge.model=<id>, with an id that the endpoint accepts"
        )
    if not _is_address(str(judge.url or "")):
        raise ConfigError(
            f"judge.url={judge.url} is not an address; give judge.url=<base url>, such as http://127.0.0.1:8000/v1"
        )
    return JudgeAnswers(replace(judge, cache=str(Path(judge.cache).expanduser() if judge.cache else root / "judge")))


def _is_address(url: str) -> bool:
    try:
        url_parts = urlsplit(url)
        return url_parts.scheme in ("http", "https") and bool(url_parts.hostname) and url_parts.port != 0
    except ValueError:  # a port that is not a number, half an IPv6 address
        return False

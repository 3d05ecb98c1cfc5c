"""Questions asked of an endpoint: one attempt over HTTP, its time limit, and many questions side by side."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmkv_bench.judging.judge_config import JudgeSettings
from mmkv_bench.judging.question import Question
from mmkv_bench.secrecy import without_secrets

if TYPE_CHECKING:
    import requests


class RequestTimeout:
    """Ends a thread's connection when the time of its request is up.

    late: True where that happened to the last request; its result is then no answer.
    """

    def __init__(self) -> None:
        self.connection: Any = None
        self.late = False

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        self.late = False
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def uses(self, connection: Any) -> None:
        """Called by a connection before it waits for anything. Raises TimeoutError when the time is up already."""
        self.connection = connection
        if self.late:
            raise TimeoutError("the request's time is up")

    def _end(self) -> None:
        self.late = True
        if (sock := getattr(self.connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):  # ended by itself
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # also below TLS; the waiting thread reads an end


def watched_session(watch: RequestTimeout) -> requests.Session:
    """A session whose connections report their use to `watch`; for one thread."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection

    class Plain(HTTPConnection):
        def connect(self) -> None:
            watch.uses(self)
            super().connect()

        def request(self, *args: Any, **options: Any) -> None:
            watch.uses(self)
            super().request(*args, **options)

    class Secure(Plain, HTTPSConnection):
        """Its own `connect` comes after that of `Plain`, which it calls."""

    pools = {
        "http": type("PlainPool", (HTTPConnectionPool,), {"ConnectionCls": Plain}),
        "https": type("SecurePool", (HTTPSConnectionPool,), {"ConnectionCls": Secure}),
    }

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            super().init_poolmanager(*args, **options)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
            manager = super().proxy_manager_for(*args, **options)
            manager.pool_classes_by_scheme = pools
            return manager

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    return session


LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PASSING = {408, 409, 425, 429}  # and 5xx: the same request may succeed later
OF_THE_QUESTION = {400, 413, 422}  # this question is refused, another one may not be
LONGEST = 8 << 20  # bytes of a reply
EXCERPT = 160  # characters of a server's message that are quoted


class Failure(Exception):
    """An attempt without an answer.

    passes: another attempt may succeed; wait_s: how long the endpoint asks to wait before it [s].
    alone: it concerns this question and says nothing about others.
    """

    def __init__(self, reason: str, passes: bool = False, wait_s: float = 0.0, alone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.passes, self.wait_s, self.alone = reason, passes, wait_s, alone


@dataclass(frozen=True)
class Reply:
    """text: the answer; served: the model's name as the endpoint gives it."""

    text: str
    served: str | None


class Endpoint:
    """`<url>/chat/completions`. May be used by several threads. The key stands in no message and no reply."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.address = settings.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.loopback = urlsplit(self.address).hostname in LOOPBACK
        self.shown = settings.address
        self._local = threading.local()

    def ask(self, question: Question) -> Reply:
        """One attempt. Raises Failure."""
        import requests
        import urllib3

        settings, key = self.settings, self._key()
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": list(question.messages),
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
        }
        session, watch = self._session()
        slow = Failure(f"{self.shown} did not answer within {settings.timeout_s:g} s", passes=True)
        try:
            with (
                watch.limit(settings.timeout_s),
                session.post(
                    self.address,
                    json=body,
                    auth=_Bearer(key),
                    timeout=settings.timeout_s,
                    allow_redirects=False,  # the key goes to the configured endpoint alone
                    stream=True,
                ) as response,
            ):
                text = self._text(response)
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError):
            raise slow from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            if watch.late:
                raise slow from None
            invalid = isinstance(error, ValueError)  # of the url, which no attempt mends
            what = "cannot be asked" if invalid else "cannot be reached or breaks off"
            raise Failure(f"{self.shown} {what} ({type(error).__name__})", passes=not invalid) from None
        if watch.late:
            raise slow
        if response.status_code != 200:
            raise self._refusal(response.status_code, response.headers.get("Retry-After"), text)
        return self._reply(text, question)

    def _text(self, response: requests.Response) -> str:
        """Read the body as it arrives, up to the length of the longest answer."""
        data = b""
        while chunk := response.raw.read1(1 << 16, decode_content=True):
            data += chunk
            if len(data) > LONGEST:
                raise Failure(f"{self.shown} replied with more than {LONGEST >> 20} MiB", passes=True)
        return data.decode("utf-8", errors="replace")

    def _reply(self, data: str, question: Question) -> Reply:
        try:
            body = json.loads(data)
            text, served = body["choices"][0]["message"]["content"], body.get("model")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            got = self.hide(data)[:EXCERPT]
            raise Failure(f"{self.shown} replied with what is no chat completion: {got!r}", passes=True) from None
        text = self.hide(text) if isinstance(text, str) else ""
        if not question.readable(text):
            reason = f"its answer is not of the form that the scorer reads: {text[:EXCERPT]!r}"
            raise Failure(reason, passes=True, alone=True)
        return Reply(text, self.hide(served) if isinstance(served, str) else None)

    def _refusal(self, code: int, retry_after: str | None, text: str) -> Failure:
        if code in (401, 403):
            name = self.settings.key_env
            key = f"the key in {name}" if name and self._key() else "a request without a key (judge.key_env)"
            return Failure(f"{self.shown} refuses {key} ({code})")
        message = f"{self.shown} answers {code}: {self.hide(text)[:EXCERPT]!r}"
        if code in PASSING or code >= 500:
            return Failure(message, passes=True, wait_s=_retry_after(retry_after))
        return Failure(message, alone=code in OF_THE_QUESTION)

    def hide(self, text: str) -> str:
        """The text without the key, however it is encoded; placeholders such as `EMPTY` are no secrets, and may be words
        of an answer."""
        key = self.settings.key()
        return without_secrets(text, [key]) if key else text

    def _key(self) -> str | None:
        key, name = self.settings.key(), self.settings.key_env
        if name and name == "OPENAI_API_KEY" and key is None:
            raise Failure(f"{name} is not set; it holds the judge's key")
        if key and not (key.isascii() and key.isprintable()):
            raise Failure(f"what {name} holds is no key: it has characters that no header may have")
        return key

    def _session(self) -> tuple[requests.Session, RequestTimeout]:
        """This thread's session, and the watch over its connections."""
        if not hasattr(self._local, "session"):
            self._local.watch = RequestTimeout()
            self._local.session = watched_session(self._local.watch)
            self._local.session.trust_env = not self.loopback  # no proxy stands between a machine and itself
        return self._local.session, self._local.watch


class _Bearer:
    """Sets the key per request; given as `auth` so that no .netrc puts another secret in its place."""

    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, request: Any) -> Any:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request


def _retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number of seconds or a date; 0 for none or nonsense."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


LONGEST_WAIT_S = 120.0  # an endpoint that asks for more is not waited for
LOST_IN_A_ROW = 3  # questions without an answer after which an endpoint that has answered counts as gone

Keep = Callable[[Question, Reply], None]


class Asker:
    """Asks one endpoint until it is gone; `gone` is then the reason. A dead judge costs one question's attempts.

    An endpoint is gone when it refuses the key or the model, when it never answered and one question's attempts are
    used up, or when that many questions in a row got nothing. Unreadable answers and refusals of one question
    do not count.
    """

    def __init__(self, settings: JudgeSettings, endpoint: Endpoint | None = None) -> None:
        self.settings = settings
        self.endpoint = endpoint or Endpoint(settings)
        self.gone: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._answered, self._lost = False, 0
        self._random = random.SystemRandom()  # jitter; scorers seed the shared generator

    def ask_all(self, questions: Mapping[str, Question], keep: Keep) -> dict[str, Reply | Failure]:
        """Ask questions: name -> reply or failure. `keep` is called with each reply as it arrives, in the asking thread.

        The first question goes alone until the endpoint has answered once; then `concurrency` at a time.
        """
        outcomes: dict[str, Reply | Failure] = {}
        waiting = dict(questions)
        while waiting and not self._answered and self.gone is None:
            name = next(iter(waiting))
            outcomes[name] = self._attempts(waiting.pop(name), keep)
        with ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="judge") as pool:
            futures = {pool.submit(self._attempts, question, keep): name for name, question in waiting.items()}
            try:
                for future in as_completed(futures):
                    outcomes[futures[future]] = future.result()
            except BaseException:  # an interrupted run, a full disk: nothing more is asked
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return outcomes

    def _attempts(self, question: Question, keep: Keep) -> Reply | Failure:
        failure = Failure(self.gone or "not asked")
        for attempt in range(1 + self.settings.retries):
            if self.gone is not None or self._stop.is_set():
                return Failure(self.gone or "the run was interrupted")
            try:
                reply = self.endpoint.ask(question)
            except Failure as caught:
                failure = caught
            else:
                keep(question, reply)
                self._count(None)
                return reply
            if not failure.passes or failure.wait_s > LONGEST_WAIT_S:
                break
            if attempt < self.settings.retries and not failure.alone:
                self._stop.wait(max(self._backoff(attempt), failure.wait_s))
        self._count(failure)
        return failure

    def _backoff(self, attempt: int) -> float:
        """The wait before the next attempt [s]: doubled with each, with jitter so that questions do not come back together."""
        return min(LONGEST_WAIT_S, self.settings.backoff_s * 2**attempt) * self._random.uniform(0.5, 1.0)

    def _count(self, failure: Failure | None) -> None:
        with self._lock:
            if failure is None or failure.alone:  # it answers, if not this question
                self._answered, self._lost = True, 0
                return
            self._lost += 1
            if not failure.passes or not self._answered or self._lost >= LOST_IN_A_ROW:
                self.gone = self.gone or failure.reason

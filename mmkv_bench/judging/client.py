"""The ways in which metric code asks a judge: `ask` and `ask_all` in this package's tasks, and a server for lmms-eval's scorers.

  from mmkv_bench.judging.client import ask

  def process_results(doc, results):
      events = ask(EXTRACT.format(caption=results[0]), max_tokens=512, readable=is_list, example='["a man runs"]')
      ...

Do not catch JudgeError: the sample is then `not judged` instead of 0. It is also raised while questions are only collected
(answers.py explains the rounds). So metric code may run several times per sample and must have no side effects. A scorer with
other metrics that need no judge catches JudgeError and returns only those.

lmms-eval's scorers take a server on this process's loopback (`Proxy`) for OpenAI. They read the judge's address when their
module is loaded, some once per process, in one of two forms: the base url (clients of the package `openai`) or the full url
(posted to unchanged). The proxy answers both. It never waits for a judge and uses no network. A question without an answer gets
a filler, and the pass remembers that.
"""

from __future__ import annotations

import json
import secrets
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

from mmkv_bench.judging.answers import JudgeAnswers
from mmkv_bench.judging.questions import JUDGED, JudgedMetric, JudgeError, Question, Readable, metric_of, not_blank

FILLER = "0 Z"
"""The answer that lmms-eval's scorers get while a question has none. It ends the waiting of every shipped scorer at once:
MM-Vet and WorldQA read a number, HR-Bench the letter for `none of these`. The resulting score is dropped."""

Owner = int | None
"""Position of the sample that asks, or None while lmms-eval aggregates."""


@dataclass(frozen=True)
class AskedQuestion:
    """A question that a scorer asked. metric: None if unknown; the question then counts for all of the sample's metrics."""

    metric: str | None
    question: Question
    answered: bool


class ScoringPass:
    """One pass of a task's scorer over its samples. It gives the scorer the known answers and collects the other questions.

    An owner is the sample (position) for which a question is asked, or None while lmms-eval aggregates.

    asked       the questions in order
    unanswered  {owner: {metric or None: reason}}: a filler replaced the missing answer, so the scorer's result is worthless
    refused     {owner: reason}: JudgeError was raised, so a result that the scorer still returned needed no answer
    """

    def __init__(self, answers: JudgeAnswers, judged: tuple[JudgedMetric, ...]) -> None:
        self.answers = answers
        self.judged = judged
        self.asked: list[AskedQuestion] = []
        self.unanswered: dict[Owner, dict[str | None, str]] = {}
        self.refused: dict[Owner, str] = {}
        self._owners: tuple[Owner, ...] = (None,)

    @contextmanager
    def of(self, owners: Iterable[Owner]) -> Iterator[None]:
        """Context manager: questions asked inside it belong to the samples `owners`."""
        outer_owners, self._owners = self._owners, tuple(owners)
        try:
            yield
        finally:
            self._owners = outer_owners

    def lacks(self, owner: Owner) -> bool:
        """Return True if a question of this sample had no answer, so that an exception of its scorer is no error."""
        return owner in self.unanswered or owner in self.refused

    def answer(self, question: Question, example: str | None = None) -> str:
        """Return the judge's answer, for scorers of this package.

        example: not used here; a `Probe` returns it in place of an answer.

        Raises:
            JudgeError: there is no answer (yet).
        """
        try:
            return self._look_up(None, question)
        except JudgeError as error:
            for owner in self._owners:
                self.refused.setdefault(owner, str(error))
            raise

    def fill(self, question: Question) -> str:
        """Return the judge's answer, for lmms-eval's scorers. Without one, return `FILLER` and note that the score
        is worthless."""
        metric = None
        if (judged_metric := metric_of(self.judged, question)) is not None:
            metric, question = judged_metric.metric, replace(question, readable=judged_metric.readable)
        try:
            return self._look_up(metric, question)
        except JudgeError as error:
            for owner in self._owners:
                self.unanswered.setdefault(owner, {}).setdefault(metric, str(error))
            return FILLER

    def _look_up(self, metric: str | None, question: Question) -> str:
        question = self.answers.as_asked(question)
        try:
            answer_text = self.answers.look_up(question)
        except JudgeError:
            self.asked.append(AskedQuestion(metric, question, False))
            raise
        self.asked.append(AskedQuestion(metric, question, True))
        return answer_text


class Probe(ScoringPass):
    """A pass without a judge, which only records the questions that a scorer asks, until the scorer needs a real
    answer."""

    def __init__(self, judged: tuple[JudgedMetric, ...]) -> None:
        super().__init__(JudgeAnswers(), judged)

    def lacks(self, owner: Owner) -> bool:
        return True

    def answer(self, question: Question, example: str | None = None) -> str:
        self._look_up(None, question)
        if example is None:
            raise JudgeError("what follows depends on the answer")
        return example

    def _look_up(self, metric: str | None, question: Question) -> str:
        self.asked.append(AskedQuestion(metric, question, False))
        return FILLER


_OPEN_PASSES: list[
    ScoringPass
] = []  # a process scores one task at a time, as scoring changes working folder and stdout


@contextmanager
def asking(scoring_pass: ScoringPass) -> Iterator[None]:
    """Context manager: questions inside it (of `ask`, `ask_all` and the proxy) go to this scoring pass."""
    _OPEN_PASSES.append(scoring_pass)
    try:
        yield
    finally:
        _OPEN_PASSES.remove(scoring_pass)


def ask(prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return the judge's answer to a user prompt or to chat messages. options: as for `ask_all`.

    Raises:
        JudgeError: there is no answer (yet).
    """
    (answer,) = ask_all([prompt], **options)
    return answer


def ask_all(
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    readable: Readable = not_blank,
    example: str | None = None,
) -> list[str]:
    """Return the judge's answers to independent questions, which are asked concurrently.

    Args:
        prompts: user prompts, or lists of chat messages.
        temperature: temperature of the judge.
        max_tokens: most tokens of an answer.
        readable: function that returns whether the scorer can read an answer. An unreadable answer is not stored, and the
            question is repeated.
        example: an answer of the right form. It replaces the judge's answer while the task's prompts are hashed, so that
            questions that depend on the answer are hashed too. Without it the hash ends with this question.

    Raises:
        JudgeError: a question has no answer (yet).
    """
    if not _OPEN_PASSES:
        raise JudgeError("there is no judge outside of the score stage; call this only while answers are scored")
    questions = [Question.of(prompt, temperature, max_tokens, readable) for prompt in prompts]
    answers, errors = [], []
    for question in questions:  # without stopping at a missing answer, so that one round collects all
        try:
            answers.append(_OPEN_PASSES[-1].answer(question, example))
        except JudgeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


Result = TypeVar("Result")
ROUNDS = 12  # a scorer whose questions each depend on the answer before needs one more round than questions


def in_rounds(
    task: str, answers: JudgeAnswers, one_pass: Callable[[ScoringPass], Result]
) -> tuple[Result, ScoringPass]:
    """Run a scorer until it asks no new question, at most `ROUNDS` times. Return (last result, pass of that result).

    Samples with questions that are then still new are not judged.

    one_pass: function that runs the scorer in a pass.
    """
    passes_done = 0
    while True:
        scoring_pass = ScoringPass(answers, JUDGED.get(task, ()))
        with asking(scoring_pass):
            result = one_pass(scoring_pass)
        passes_done += 1
        if not answers.fetch() or passes_done == ROUNDS:
            return result, scoring_pass


# The server for lmms-eval's scorers

PATH = "/v1/chat/completions"
LARGEST = 64 << 20  # maximum bytes of a question


class Proxy(socketserver.ThreadingTCPServer):
    """Local server that stands in for OpenAI. Its address is known once it is made, but it answers only after `listen`.

    token: the key that scorers get, so that other processes cannot ask in their name."""

    daemon_threads = True

    def __init__(self) -> None:
        self.token = f"loopback-{secrets.token_hex(16)}"
        super().__init__(("127.0.0.1", 0), partial(_Handler, self.token), bind_and_activate=False)
        self.server_bind()
        self._thread: threading.Thread | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listen(self) -> None:
        """Start answering requests. A second call does nothing."""
        if self._thread is None:
            self.server_activate()
            self._thread = threading.Thread(target=self.serve_forever, name="judge-proxy", daemon=True)
            self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a scorer that closed the connection."""


@cache
def proxy() -> Proxy:
    return Proxy()


def task_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return environment variables that make the local proxy the judge of a task's code, without a real key.

    environment: the process's environment, for its list of hosts without an HTTP proxy.
    """
    judge = proxy()
    no_proxy_hosts = environment.get("no_proxy") or environment.get("NO_PROXY")
    no_proxy_hosts = f"{no_proxy_hosts},127.0.0.1" if no_proxy_hosts else "127.0.0.1"
    return {
        "API_TYPE": "openai",
        "OPENAI_API_KEY": judge.token,
        "OPENAI_API_URL": judge.root + PATH,  # used as base or as full url; the proxy answers both paths
        "OPENAI_BASE_URL": f"{judge.root}/v1",  # of the package `openai`
        "MODEL_VERSION": "judge",  # ignored: the configured model is asked
        "NO_PROXY": no_proxy_hosts,
        "no_proxy": no_proxy_hosts,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a silent connection [s]

    def __init__(self, token: str, *request: Any) -> None:
        self.token = token
        super().__init__(*request)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        body = self.rfile.read(int(length)) if length.isdecimal() and int(length) <= LARGEST else b""
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._send(401, {"error": {"message": "this address answers the scorers of its own process"}})
        if not self.path.endswith("/chat/completions"):
            return self._send(404, {"error": {"message": "only /chat/completions is answered"}})
        scoring_pass = next(iter(_OPEN_PASSES[-1:]), None)  # taken once: it may close while the body is read
        if scoring_pass is None:
            return self._send(503, {"error": {"message": "nothing is being scored"}})
        try:
            request = json.loads(body)
            max_tokens = request.get("max_tokens") or request.get("max_completion_tokens") or 1024
            question = Question.of(request["messages"], request.get("temperature", 0.0), max_tokens)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self._send(400, {"error": {"message": f"no chat completion request: {error!r}"}})
        message = {"role": "assistant", "content": scoring_pass.fill(question)}
        completion = {"id": "judge", "object": "chat.completion", "created": int(time.time()), "model": "judge"}
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        return self._send(200, completion | {"choices": choices, "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: rows and notices report on questions."""

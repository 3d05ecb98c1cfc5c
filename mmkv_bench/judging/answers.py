"""Answers of a judge to this run's scorers, and the cache of earlier answers.

Scorers ask one question after another. Some wait only 30 s for an answer; without one they sleep, ask again and then score 0.
So no scorer ever waits for the judge. A pass through the scorer (`ScoringPass`) collects the questions without an answer.
Between two passes `JudgeAnswers.fetch` asks them. Questions that depend on answers come in later passes. A question without an
answer in the last pass is `not judged`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.judging.endpoint import Endpoint, Reply, address_of
from mmkv_bench.judging.questions import JudgeError, Question

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Judge


NOT_JUDGED = "not judged"
"""Prefix of the reason for every metric that lacks an answer of its judge."""
CHECKSUM = "sha256"
"""Key of the checksum of a file's other keys."""


def _checksum(record: Mapping[str, Any]) -> str:
    others = {name: value for name, value in record.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True, default=dict).encode()).hexdigest()[:16]


class AnswerCache:
    """A cache of answers in files `<folder>/<first two digits>/<digest>.json`. Any number of processes may use it; a file is
    complete or absent.

    address: address of the endpoint that gave the answers (`address_of`).
    """

    def __init__(self, folder: Path, model: str, address: str) -> None:
        self.folder = folder.expanduser().absolute()  # scoring changes the working folder
        self.model, self.address = model, address

    def get(self, question: Question) -> str | None:
        """Return the cached answer. Return None if there is none, or its file is unreadable or fails its checksum (older files
        have none)."""
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
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as staged:
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
        """Return the reason why no more questions are sent to the judge's endpoint; None while questions may be sent."""
        return self._endpoint.gone if self._endpoint else None

    def as_asked(self, question: Question) -> Question:
        """Return the question with the temperature that the settings prescribe, if they prescribe one."""
        temperature = self.settings.temperature if self.settings else None
        return question if temperature is None else replace(question, temperature=float(temperature))

    def look_up(self, question: Question) -> str:
        """Return the stored answer to a question. If there is none, note the question for the next `fetch` and raise JudgeError.

        question: as returned by `as_asked`."""
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
        """Ask the waiting questions. Return their number."""
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
        """Summarise a run's questions, and its metrics that are not judged. Return None if there is nothing to report.

        metrics: the `metrics` rows of the run's cells.
        """
        lines = []
        counts, unjudged = self.counts, [row for row in metrics if not_judged(row)]
        if self.settings is not None and counts:
            cached = f"{counts['cached']} answers from {self.settings.cache}"
            reason = self.gone or next(iter(self._failures.values()), None)
            failed = f", {counts['failed']} questions without an answer ({reason})" if counts["failed"] else ""
            lines.append(f"judge {self.model}: {counts['asked']} answers, {cached}{failed}")
        earlier = sorted({row["judge"] for row in metrics if row["judge"] not in (None, self.model)})
        if self.settings is not None and earlier:
            lines.append(
                f"scores of {', '.join(earlier)} are kept where {self.model} did not answer all questions of a metric"
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
    """Tell whether a `metrics` row lacks answers of a judge."""
    return str(row["lmms_eval_reason"] or "").startswith(NOT_JUDGED)


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


def judge_answers(judge: Judge, root: Path) -> JudgeAnswers:
    """Return the answers for a run whose rows are in `root`. No question is asked and no file is created yet.

    Raises ConfigError if the judge has no model or no address.
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
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, half an IPv6 address
        return False

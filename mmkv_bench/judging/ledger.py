"""The ledger between scorers and a judge: questions are collected, asked side by side, and answered in the next pass.

Scorers ask one question after the other, some wait only 30 s for an answer, and when they get none they sleep, ask again
and then score 0. So none of them ever waits for the judge. A pass through the scorer (`ScoringPass`) collects the questions
that have no answer yet; between two passes the ledger asks them; questions that follow from answers come in later passes.
What has no answer in the last pass is `not judged`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter

from mmkv_bench.judging.asking import Asker
from mmkv_bench.judging.cache import AnswerCache
from mmkv_bench.judging.endpoint import Reply
from mmkv_bench.judging.judge_config import JudgeSettings
from mmkv_bench.judging.question import JudgeError, Question

NO_JUDGE = "no judge was asked (judge=none)"
NOT_YET = "not asked yet"


class Ledger:
    """All questions of a run's score stage and what became of them. Without settings there is no judge.

    counts: questions `asked` of the endpoint with an answer, `cached`, and `failed`; each question counts once.
    """

    def __init__(self, settings: JudgeSettings | None = None, asker: Asker | None = None) -> None:
        self.settings = settings
        self.asker = asker or (Asker(settings) if settings else None)
        self.cache = AnswerCache(settings.cache, settings.address) if settings and settings.cache else None
        self.counts: Counter[str] = Counter()
        self._answers: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._pending: dict[str, Question] = {}
        self._lock = threading.Lock()

    @property
    def model(self) -> str | None:
        return self.settings.model if self.settings else None

    @property
    def gone(self) -> str | None:
        """Why the judge answers no more; None while it does, or while it was not asked."""
        return self.asker.gone if self.asker else None

    @property
    def first_failure(self) -> str | None:
        """Why the first question that has no answer has none."""
        return next(iter(self._failures.values()), None)

    def as_asked(self, question: Question) -> Question:
        """The question at the temperature that it is asked at."""
        temperature = self.settings.temperature if self.settings else None
        return question if temperature is None else dataclasses.replace(question, temperature=float(temperature))

    def look_up(self, question: Question) -> str:
        """The answer to a question of `as_asked`. Raises JudgeError; a question not met before waits for `fetch`."""
        if self.settings is None:
            raise JudgeError(NO_JUDGE)
        digest = question.digest(self.settings.model, self.settings.address)
        with self._lock:
            if digest in self._answers and question.readable(self._answers[digest]):
                return self._answers[digest]
            if digest in self._failures:
                raise JudgeError(self._failures[digest])
            kept = self.cache.get(question, self.settings.model) if self.cache else None
            if kept is not None:
                self.counts["cached"] += 1
                return self._answers.setdefault(digest, kept)
            self._pending[digest] = question
        raise JudgeError(NOT_YET)

    @property
    def waiting(self) -> int:
        """How many questions `fetch` would ask."""
        return len(self._pending)

    def fetch(self) -> bool:
        """Ask what waits. Returns whether there is any new answer."""
        if not self._pending or self.asker is None:  # without a judge nothing waits
            return False
        outcomes = self.asker.ask_all(self._pending, self._keep)
        self._pending = {}
        for digest, outcome in outcomes.items():
            if isinstance(outcome, Reply):
                self._answers[digest] = outcome.text
                self.counts["asked"] += 1
            else:
                self._failures[digest] = outcome.reason
                self.counts["failed"] += 1
        return any(isinstance(outcome, Reply) for outcome in outcomes.values())

    def _keep(self, question: Question, reply: Reply) -> None:
        if self.cache and self.settings:
            self.cache.put(question, self.settings.model, reply.text, reply.served)

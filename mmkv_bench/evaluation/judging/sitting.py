"""One pass of a scorer over its samples: who asked what, and whose questions had no answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mmkv_bench.evaluation.judging.client import JudgeError
from mmkv_bench.evaluation.judging.desk import Desk
from mmkv_bench.evaluation.judging.known import JudgedMetric, metric_of
from mmkv_bench.evaluation.judging.question import Question

FILLER = "0 Z"
"""What a scorer of lmms-eval reads while a question has no answer. It ends every shipped scorer's waiting at once: a
number in MM-Vet's and WorldQA's eyes, the letter for `none of these` in HR-Bench's. Its score is thrown away."""

Owner = int | None
"""Position of the sample that asks; None while lmms-eval aggregates."""


class Sitting:
    """A pass over one task.

    asked       questions in their order, with the metric each is for (None: unknown, so all of the sample's)
    unanswered  owner -> metric or None -> why there was no answer, where a filler stood for one: what the scorer made
                of it is worth nothing
    refused     owner -> why, where JudgeError was raised: what the scorer returned nevertheless needed no answer
    """

    def __init__(self, desk: Desk, judged: tuple[JudgedMetric, ...]) -> None:
        self.desk = desk
        self.judged = judged
        self.asked: list[tuple[str | None, Question]] = []
        self.unanswered: dict[Owner, dict[str | None, str]] = {}
        self.refused: dict[Owner, str] = {}
        self._owners: tuple[Owner, ...] = (None,)

    @contextmanager
    def of(self, owners: Iterable[Owner]) -> Iterator[None]:
        """Questions within it are asked for these samples."""
        before, self._owners = self._owners, tuple(owners)
        try:
            yield
        finally:
            self._owners = before

    def answer(self, question: Question, example: str | None = None) -> str:
        """For code that knows of JudgeError, and raises it when there is no answer."""
        question = self.desk.as_asked(question)
        self.asked.append((None, question))
        try:
            return self.desk.look_up(question)
        except JudgeError as error:
            for owner in self._owners:
                self.refused.setdefault(owner, str(error))
            raise

    def fill(self, question: Question) -> str:
        """For lmms-eval's scorers: always a text, a filler where there is no answer."""
        known = metric_of(self.judged, question)
        metric = known.metric if known else None
        if known:
            question = Question(question.messages, question.temperature, question.max_tokens, known.readable)
        question = self.desk.as_asked(question)
        self.asked.append((metric, question))
        try:
            return self.desk.look_up(question)
        except JudgeError as error:
            for owner in self._owners:
                self.unanswered.setdefault(owner, {}).setdefault(metric, str(error))
            return FILLER

"""One pass of a scorer over its samples: who asked what, and whose questions had no answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mmkv_bench.judging.known_judges import JudgedMetric, metric_of
from mmkv_bench.judging.ledger import Ledger
from mmkv_bench.judging.question import JudgeError, Question

FILLER = "0 Z"
"""What a scorer of lmms-eval reads while a question has no answer. It ends every shipped scorer's waiting at once: a
number in MM-Vet's and WorldQA's eyes, the letter for `none of these` in HR-Bench's. Its score is thrown away."""

Owner = int | None
"""Position of the sample that asks; None while lmms-eval aggregates."""


@dataclass(frozen=True)
class Asked:
    """A question that a scorer asked: for which metric (None: unknown, so all of the sample's), and with what outcome."""

    metric: str | None
    question: Question
    answered: bool


class ScoringPass:
    """A pass over one task.

    asked       questions in their order
    unanswered  owner -> metric or None -> why there was no answer, where a filler stood for one: what the scorer made
                of it is worth nothing
    refused     owner -> why, where JudgeError was raised: what the scorer returned nevertheless needed no answer
    """

    def __init__(self, ledger: Ledger, judged: tuple[JudgedMetric, ...]) -> None:
        self.ledger = ledger
        self.judged = judged
        self.asked: list[Asked] = []
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

    def lacks(self, owner: Owner) -> bool:
        """Whether a question of this sample had no answer: then an exception of its scorer is no error."""
        return owner in self.unanswered or owner in self.refused

    def answer(self, question: Question, example: str | None = None) -> str:
        """For code that knows of JudgeError, and raises it when there is no answer."""
        question = self.ledger.as_asked(question)
        try:
            text = self.ledger.look_up(question)
        except JudgeError as error:
            self.asked.append(Asked(None, question, False))
            for owner in self._owners:
                self.refused.setdefault(owner, str(error))
            raise
        self.asked.append(Asked(None, question, True))
        return text

    def fill(self, question: Question) -> str:
        """For lmms-eval's scorers: always a text, a filler where there is no answer."""
        metric, question = self._recognised(question)
        question = self.ledger.as_asked(question)
        try:
            text = self.ledger.look_up(question)
        except JudgeError as error:
            self.asked.append(Asked(metric, question, False))
            for owner in self._owners:
                self.unanswered.setdefault(owner, {}).setdefault(metric, str(error))
            return FILLER
        self.asked.append(Asked(metric, question, True))
        return text

    def _recognised(self, question: Question) -> tuple[str | None, Question]:
        known = metric_of(self.judged, question)
        if known is None:
            return None, question
        return known.metric, dataclasses.replace(question, readable=known.readable)


class Probe(ScoringPass):
    """A pass that asks nobody: it only notes which questions a scorer asks, as far as it gets."""

    def __init__(self, judged: tuple[JudgedMetric, ...]) -> None:
        super().__init__(Ledger(), judged)

    def lacks(self, owner: Owner) -> bool:
        return True

    def answer(self, question: Question, example: str | None = None) -> str:
        self.asked.append(Asked(None, question, False))
        if example is None:
            raise JudgeError("what follows depends on the answer")
        return example

    def fill(self, question: Question) -> str:
        metric, question = self._recognised(question)
        self.asked.append(Asked(metric, question, False))
        return FILLER

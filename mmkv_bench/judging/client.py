"""The way from metric code to the judge: `ask` and `ask_all` of our own tasks, and the passes through a scorer.

    from mmkv_bench.judging.client import ask

    def process_results(doc, results):
        events = ask(EXTRACT.format(caption=results[0]), max_tokens=512, readable=is_list, example='["a man runs"]')
        ...

Let JudgeError pass: the sample is then `not judged` and not 0. It is also raised while questions are only being collected
(answers.py explains the rounds), so metric code may run several times for a sample and must have no effects. A scorer with
further metrics that need no judge catches it and returns those alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from mmkv_bench.judging.answers import JudgeAnswers
from mmkv_bench.judging.questions import JUDGED, JudgedMetric, JudgeError, Question, Readable, metric_of, not_blank

FILLER = "0 Z"
"""What a scorer of lmms-eval reads while a question has no answer. It ends every shipped scorer's waiting at once: a
number in MM-Vet's and WorldQA's eyes, the letter for `none of these` in HR-Bench's. Its score is thrown away."""

Owner = int | None
"""Position of the sample that asks; None while lmms-eval aggregates."""


@dataclass(frozen=True)
class AskedQuestion:
    """A question that a scorer asked. metric: None where unknown; the question then counts for all of the sample's metrics."""

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

    def __init__(self, answers: JudgeAnswers, judged: tuple[JudgedMetric, ...]) -> None:
        self.answers = answers
        self.judged = judged
        self.asked: list[AskedQuestion] = []
        self.unanswered: dict[Owner, dict[str | None, str]] = {}
        self.refused: dict[Owner, str] = {}
        self._owners: tuple[Owner, ...] = (None,)

    @contextmanager
    def of(self, owners: Iterable[Owner]) -> Iterator[None]:
        """Questions inside the block are asked for these samples."""
        outer, self._owners = self._owners, tuple(owners)
        try:
            yield
        finally:
            self._owners = outer

    def lacks(self, owner: Owner) -> bool:
        """True where a question of this sample had no answer: an exception of its scorer is then no error."""
        return owner in self.unanswered or owner in self.refused

    def answer(self, question: Question, example: str | None = None) -> str:
        """The answer for code that handles JudgeError, which is raised without an answer."""
        try:
            return self._look_up(None, question)
        except JudgeError as error:
            for owner in self._owners:
                self.refused.setdefault(owner, str(error))
            raise

    def fill(self, question: Question) -> str:
        """The answer for lmms-eval's scorers: always a text, a filler without an answer."""
        metric = None
        if (known := metric_of(self.judged, question)) is not None:
            metric, question = known.metric, dataclasses.replace(question, readable=known.readable)
        try:
            return self._look_up(metric, question)
        except JudgeError as error:
            for owner in self._owners:
                self.unanswered.setdefault(owner, {}).setdefault(metric, str(error))
            return FILLER

    def _look_up(self, metric: str | None, question: Question) -> str:
        question = self.answers.as_asked(question)
        try:
            text = self.answers.look_up(question)
        except JudgeError:
            self.asked.append(AskedQuestion(metric, question, False))
            raise
        self.asked.append(AskedQuestion(metric, question, True))
        return text


class Probe(ScoringPass):
    """A pass that asks no judge and records the questions of a scorer, as far as it gets."""

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


_OPEN: list[ScoringPass] = []  # scoring is one at a time in a process: it also changes the working folder and stdout


@contextmanager
def asking(scoring_pass: ScoringPass) -> Iterator[None]:
    """Within it, `ask`, `ask_all` and the proxy bring their questions to this scoring_pass."""
    _OPEN.append(scoring_pass)
    try:
        yield
    finally:
        _OPEN.remove(scoring_pass)


def open_pass() -> ScoringPass | None:
    """The scoring_pass that questions go to; None outside of scoring."""
    return _OPEN[-1] if _OPEN else None


def ask(prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The judge's answer to a user prompt or to chat messages; options: those of `ask_all`.

    Raises JudgeError when there is no answer (yet).
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
    """The judge's answers to questions that do not depend on each other: they are asked side by side.

    temperature, max_tokens: of the judge's answers [tokens]. readable: whether the scorer can read an answer; one it
    cannot is asked for again, and kept nowhere. example: an answer of the right form, for asking what comes after it
    when the prompts are hashed; without it the hash ends with this question.

    Raises JudgeError when one of them has no answer (yet).
    """
    scoring_pass = open_pass()
    if scoring_pass is None:
        raise JudgeError("a judge is asked while answers are scored; outside the score stage there is none")
    questions = [Question.of(prompt, temperature, max_tokens, readable) for prompt in prompts]
    answers, errors = [], []
    for question in questions:  # all of them, so that one round collects all
        try:
            answers.append(scoring_pass.answer(question, example))
        except JudgeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


Result = TypeVar("Result")
ROUNDS = 12  # a scorer whose every question follows from the answer before needs one more than it has questions


def in_rounds(
    task: str, answers: JudgeAnswers, one_pass: Callable[[ScoringPass], Result]
) -> tuple[Result, ScoringPass]:
    """Run passes until none asks anything new; return the last result with its pass. A task that asks no judge has one pass.

    A scorer that asks new questions without end is left after `ROUNDS` passes; its samples are not judged.
    """
    passes = 0
    while True:
        scoring_pass = ScoringPass(answers, JUDGED.get(task, ()))
        with asking(scoring_pass):
            result = one_pass(scoring_pass)
        passes += 1
        waiting = answers.waiting
        answers.fetch()
        if not waiting or passes == ROUNDS:
            return result, scoring_pass

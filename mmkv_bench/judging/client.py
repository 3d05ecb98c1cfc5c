"""The functions by which metric code asks a judge: `ask` and `ask_all` for this package's tasks, and passes through a scorer.

  from mmkv_bench.judging.client import ask

  def process_results(doc, results):
      events = ask(EXTRACT.format(caption=results[0]), max_tokens=512, readable=is_list, example='["a man runs"]')
      ...

Do not catch JudgeError: the sample is then `not judged` instead of 0. It is also raised while questions are only collected
(answers.py explains the rounds). So metric code may run several times per sample and must have no side effects. A scorer with
other metrics that need no judge catches JudgeError and returns only those.
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
        """Attribute questions inside the block to these samples."""
        outer, self._owners = self._owners, tuple(owners)
        try:
            yield
        finally:
            self._owners = outer

    def lacks(self, owner: Owner) -> bool:
        """Tell whether a question of this sample had no answer. An exception of its scorer is then not an error."""
        return owner in self.unanswered or owner in self.refused

    def answer(self, question: Question, example: str | None = None) -> str:
        """Return the judge's answer, for scorers of this package, which expect JudgeError if there is none.

        example: not used here; a `Probe` returns it in place of an answer."""
        try:
            return self._look_up(None, question)
        except JudgeError as error:
            for owner in self._owners:
                self.refused.setdefault(owner, str(error))
            raise

    def fill(self, question: Question) -> str:
        """Return the judge's answer, for lmms-eval's scorers, which cannot handle a missing answer. If there is none, return a
        filler text and record that the sample's score is worthless."""
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
    """A pass without a judge that only records the questions that a scorer asks, until the scorer needs a real answer."""

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


_OPEN: list[ScoringPass] = []  # a process scores one task at a time, as scoring changes working folder and stdout


@contextmanager
def asking(scoring_pass: ScoringPass) -> Iterator[None]:
    """Send questions of `ask`, `ask_all` and the proxy inside the block to this scoring_pass."""
    _OPEN.append(scoring_pass)
    try:
        yield
    finally:
        _OPEN.remove(scoring_pass)


def open_pass() -> ScoringPass | None:
    """Return the scoring_pass that gets questions, or None outside of scoring."""
    return _OPEN[-1] if _OPEN else None


def ask(prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return the judge's answer to a user prompt or to chat messages. options: as for `ask_all`.

    Raises JudgeError if there is no answer (yet).
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

    temperature: temperature of the judge. max_tokens: most tokens of an answer.
    readable: tells whether the scorer can read an answer. An unreadable answer is not stored, and the question is repeated.
    example: an answer of the right form. It stands for the judge's answer while the task's prompts are hashed, so that questions
    that depend on the answer are hashed too. Without it the hash ends with this question.

    Raises JudgeError if a question has no answer (yet).
    """
    scoring_pass = open_pass()
    if scoring_pass is None:
        raise JudgeError("there is no judge outside of the score stage; call this only while answers are scored")
    questions = [Question.of(prompt, temperature, max_tokens, readable) for prompt in prompts]
    answers, errors = [], []
    for question in questions:  # without stopping at a missing answer, so that one round collects all
        try:
            answers.append(scoring_pass.answer(question, example))
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
    """Run passes until no pass asks a new question. Return the last result with its pass. A task without a judge has one pass.

    After `ROUNDS` passes a scorer that still asks new questions is stopped, and its samples are not judged.
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

"""How the metric code of our own tasks asks the judge: `ask` and `ask_all`.

    from mmkv_bench.judging.client import ask

    def process_results(doc, results):
        events = ask(EXTRACT.format(caption=results[0]), max_tokens=512, readable=is_list, example='["a man runs"]')
        ...

Let JudgeError pass: the sample is then `not judged` and not 0. It is also raised while questions are only being
collected (ledger.py explains the rounds), so metric code may run several times for a sample and must have no effects.
A scorer with further metrics that need no judge catches it and returns those alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmkv_bench.judging.question import JudgeError, Question, Readable, not_blank

if TYPE_CHECKING:
    from mmkv_bench.judging.scoring_pass import ScoringPass


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


def ask(
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    readable: Readable = not_blank,
    example: str | None = None,
) -> str:
    """The judge's answer to a user prompt or to chat messages.

    temperature, max_tokens: of the judge's answer [tokens]. readable: whether the scorer can read an answer; one it
    cannot is asked for again, and kept nowhere. example: an answer of the right form, for asking what comes after it
    when the prompts are hashed; without it the hash ends with this question.

    Raises JudgeError when there is no answer (yet).
    """
    (answer,) = ask_all([prompt], temperature=temperature, max_tokens=max_tokens, readable=readable, example=example)
    return answer


def ask_all(
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    readable: Readable = not_blank,
    example: str | None = None,
) -> list[str]:
    """`ask` for several questions that do not depend on each other: they are asked side by side.

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

"""Samples for the reader model: one scored question per document, the same on every machine.

The splits `dev` and `test` share no name, word, value or typeface with each other or with training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

from mmkv_bench.reader.document_kinds import document
from mmkv_bench.reader.documents import Document

if TYPE_CHECKING:
    import numpy as np

FORMS_OF = {
    "value": ("page", "page", "page", "pages"),
    "text": ("page", "page", "page", "pages"),
    "row": ("page", "page", "page", "pages"),
    "second": ("page", "page", "page", "pages"),
    "change": ("video",),
}
"""Task -> forms of its documents in turn. `text` asks the questions of `value`, with the pages as text."""


@dataclass(frozen=True)
class Trial:
    """A sample: a document with (question, answer) turns, of which only the last is scored.

    look: seed of the document's style.
    """

    paper: Document
    turns: list[tuple[str, str]]
    look: str


def trial(task: str, split: str, number: int, form: str | None = None) -> Trial:
    """Return sample `number` of a task. form: form of its document; None: the form that `FORMS_OF` gives this number."""
    form = form or FORMS_OF[task][number % len(FORMS_OF[task])]
    for name in count(number, 10**6):  # skip documents without a fitting question
        paper = document(split, name, form)
        if turns := _turns(paper, task, number):
            return Trial(paper, turns, f"{split} {form} {number}")
    raise AssertionError("there is always another document")


def _turns(paper: Document, task: str, number: int) -> list[tuple[str, str]]:
    """Return the (question, answer) turns of a sample, the scored one last; [] if the document has no question of the task."""
    kind = {"second": "value", "text": "value"}.get(task, task)
    draw = random.Random(f"question {'value' if task == 'text' else task} {number}")
    fitting_questions = [question for question in paper.questions if question.task == kind]
    if task == "change":
        fitting_questions = [fitting_questions[(0, 1, 0, 1, 2)[number % 5]]]
    if not fitting_questions:
        return []
    scored_question = draw.choice(fitting_questions)
    other_questions = [question for question in paper.questions if question.entry != scored_question.entry]
    turns = (
        [draw.choice(other_questions), scored_question] if task == "second" and other_questions else [scored_question]
    )
    return [(question.text, question.answer) for question in turns] if len(turns) == 1 + (task == "second") else []


@lru_cache(maxsize=1)
def pictures(task: str, split: str, number: int) -> np.ndarray:
    """Draw the pages or frames of a sample: (n, side, side, 3) uint8. The pictures of the last call are cached."""
    from mmkv_bench.reader.render import draw_document
    from mmkv_bench.reader.typefaces import typefaces

    sample = trial(task, split, number)
    return draw_document(sample.paper, sample.look, typefaces(split))[0]

"""English documents with several questions each, next to each other; made once a process."""

from __future__ import annotations

import re
from functools import cache

from mmkv_bench.datasets.tasks.english.documents import document

COUNTS = {"test": 300, "dev": 100}  # documents
QUESTIONS = 4
ASK = "\n\nAnswer with the words of the text alone. "
GENERIC = "\n\nAnswer with the words of the text alone. What does the text say?"
PARAPHRASES = {
    "What is the {} in {}?": "Look at {1} and tell me its {0}.",
    "What is the code for the {} of {}?": "Which code belongs to {1} and that person's {0}?",
    "What does note {} say?": "Repeat the words of note {0}.",
}


@cache
def rows(task: str, split: str) -> tuple[dict, ...]:
    """Return the rows of a split of `records`, `needles` or `passages`, `QUESTIONS` a document."""
    made: list[dict] = []
    for number in range(COUNTS[split]):
        text = document(task, split, number)
        asked = text.questions[:QUESTIONS]
        shared = {
            "document": f"{split}-{number:06d}",
            "context": text.context,
            "questions": [ASK + question for question, _ in asked],
            "paraphrases": [ASK + in_other_words(question) for question, _ in asked],
            "generic": GENERIC,
        }
        made += [
            shared | {"question_number": place, "question": question, "answer": answer}
            for place, (question, answer) in enumerate(asked)
        ]
    return tuple(made)


def in_other_words(question: str) -> str:
    """Return the question in another frame; names and values that it asks about stay."""
    for frame, other in PARAPHRASES.items():
        match = re.fullmatch(re.escape(frame).replace(r"\{\}", "(.+)"), question)
        if match:
            return other.format(*match.groups())
    raise ValueError(f"no other words for {question!r}")

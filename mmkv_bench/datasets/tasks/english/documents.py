"""English documents with questions, for language models: records, needles in prose, and passages to copy.

A document depends on (task, split, number, sentences) alone, on every machine: only `random.Random.random` is drawn from.
`train` shares no word of the lists in `vocabulary` with `dev` and `test`, so a model trained on it has seen no name or sentence
of theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmkv_bench.datasets.tasks.english.vocabulary import words

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
SIZES = {"half": 1, "1k": 2, "4k": 8}  # how many times the parts of a document of about 200 to 350 tokens


@dataclass(frozen=True)
class Document:
    """A text and questions about it, each with its one right answer."""

    context: str
    questions: tuple[tuple[str, str], ...]


class Draw:
    """Random choices that every Python version makes alike."""

    def __init__(self, seed: str, split: str):
        self._random, self.split = random.Random(seed), split

    def below(self, count: int) -> int:
        """Return a whole number from 0 to `count` - 1."""
        return int(self._random.random() * count)

    def one(self, items: Sequence):
        """Return one item."""
        return items[self.below(len(items))]

    def some(self, items: Sequence, count: int) -> list:
        """Return `count` different items in random order; all of them in random order where `count` is their number."""
        order = sorted((self._random.random(), place) for place in range(len(items)))
        return [items[place] for _, place in order[:count]]

    def word(self, name: str) -> str:
        """Return one word of a list of the split."""
        return self.one(words(name, self.split))

    def digits(self, count: int) -> str:
        """Return a number of `count` digits that does not begin with 0."""
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(count - 1))

    def numbers(self, digits: int, count: int) -> list[str]:
        """Return `count` different numbers of `digits` digits."""
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[self.digits(digits)] = None
        return list(drawn)

    def people(self, count: int) -> list[str]:
        """Return `count` full names; no two share a last name while the list has enough of them."""
        last = self.some(words("last_names", self.split), count)
        while len(last) < count:
            last += self.some(words("last_names", self.split), count - len(last))
        return [f"{self.word('first_names')} {name}" for name in last]

    def sentence(self) -> str:
        """Return one sentence of prose, about 14 tokens."""
        text = f"{self.word('people')} {self.word('actions')} {self.word('circumstances')}."
        return text[0].upper() + text[1:]

    def clause(self) -> str:
        """Return who did what, without a full stop."""
        return f"{self.word('people')} {self.word('actions')}"

    def date(self) -> str:
        """Return a date of the 2010s."""
        return f"{1 + self.below(28)} {self.one(MONTHS)} 201{self.below(10)}"


# ---------------------------------------------------------------- records
Fields = dict[str, str]


def _invoice(draw: Draw) -> Fields:
    return {
        "date": draw.date(),
        "item": f"{draw.word('things')} and {draw.word('things')}",
        "place": draw.word("places"),
        "total": f"{draw.digits(3)}.{draw.digits(2)}",
        "order number": draw.digits(5),
    }


def _member(draw: Draw) -> Fields:
    return {
        "phone number": draw.digits(6),
        "home town": draw.word("places"),
        "date of birth": draw.date(),
        "hobby item": draw.word("things"),
        "locker": draw.digits(4),
    }


def _journey(draw: Draw) -> Fields:
    return {
        "start": draw.word("places"),
        "end": draw.word("places"),
        "departure": f"{10 + draw.below(14)}:{draw.below(6)}{draw.below(10)}",
        "platform": draw.digits(2),
        "lost property": draw.word("things"),
    }


_RECORDS: tuple[tuple[str, Callable[[Draw], Fields]], ...] = (
    ("the invoice of", _invoice),
    ("the member card of", _member),
    ("the journey of", _journey),
)


def records(draw: Draw, size: int) -> Document:
    """Forms or sentences: three records a size with five fields each; the same fields stand in several records."""
    entries = []
    for name in draw.people(3 * size):
        title, draw_fields = draw.one(_RECORDS)
        entries.append((f"{title} {name}", draw_fields(draw)))
    if draw.below(2):
        text = "\n\n".join(
            "\n".join([title[4].upper() + title[5:], *(f"- {key}: {value}" for key, value in fields.items())])
            for title, fields in entries
        )
    else:
        lines = [f"The {key} in {title} is {value}." for title, fields in entries for key, value in fields.items()]
        text = " ".join(draw.some(lines, len(lines)))
    pairs = [(f"What is the {key} in {title}?", value) for title, fields in entries for key, value in fields.items()]
    return Document(text, tuple(draw.some(pairs, len(pairs))))


# ---------------------------------------------------------------- needles
def needles(draw: Draw, size: int) -> Document:
    """Prose with four hidden codes, each with a twin: the same person and another thing, or the same thing of another."""
    prose = [draw.sentence() for _ in range(26 * size)]
    people, things = draw.people(2), draw.some(words("things", draw.split), 2)
    codes = draw.numbers(5, 4)
    pairs = [(person, thing) for person in people for thing in things]
    hidden = [
        f"The code for the {thing} of {person} is {code}." for (person, thing), code in zip(pairs, codes, strict=True)
    ]
    for needle in hidden:
        prose.insert(draw.below(len(prose) + 1), needle)
    questions = [
        (f"What is the code for the {thing} of {person}?", code)
        for (person, thing), code in zip(pairs, codes, strict=True)
    ]
    return Document(" ".join(prose), tuple(draw.some(questions, 4)))


# ---------------------------------------------------------------- passages
def passages(draw: Draw, size: int) -> Document:
    """Numbered notes of one sentence; a question asks for the words of one note."""
    count = 11 * size
    numbers = draw.numbers(3, count)
    notes = [draw.sentence()[:-1] + ", and " + draw.clause() + "." for _ in range(count)]
    text = "\n".join(f"Note {number}: {note}" for number, note in zip(numbers, notes, strict=True))
    return Document(
        text, tuple(draw.some([(f"What does note {n} say?", s) for n, s in zip(numbers, notes, strict=True)], count))
    )


TASKS: dict[str, Callable[[Draw, int], Document]] = {"records": records, "needles": needles, "passages": passages}


def document(task: str, split: str, number: int, size: str = "1k") -> Document:
    """Return document `number` (from 0) of a task's split (`train`, `dev`, `test`); size: a key of `SIZES`."""
    return TASKS[task](Draw(f"english {task} {split} {size} {number}", split), SIZES[size])


def prompt(context: str, question: str) -> str:
    """Return the text that asks one question about a document."""
    return f"{context}\n\nAnswer with the words of the text alone. {question}"

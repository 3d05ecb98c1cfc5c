"""Streams of boards that the embedded model reads: facts of known ages, all asked for at the end.

A board is a picture of 8 x 8 cells. Most cells are blank or distractors. Each of a stream's eight facts stands on one row: a key
and three digits. The age of a fact is the number of tokens between it and the end of the stream, in caps of `CAP` entries: `now`
facts lie on the last four rows, so that the newest `CAP` tokens hold them, and each other fact has one of the ages of its task.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

COUNTS = {"test": 100, "dev": 40}  # streams
CAP = 38  # tokens; a budget of as many entries makes ages what they are called
SIDE = 8  # cells of a board's rows and columns
BOARD = SIDE * SIDE + 2  # tokens of a board and its markers
NOW = 4
TASKS = {"stream_facts": (6, (1, 2, 4, 8)), "stream_facts_long": (16, (1, 4, 12, 24))}
"""Boards of a stream, and the ages of its older facts in caps. Six boards are as many as the model answers about."""


class Fact(NamedTuple):
    """A fact, and where it stands. kind: `now`, or `age_<caps>`."""

    key: str
    digits: str
    kind: str
    board: int
    row: int
    column: int

    def age(self, boards: int) -> int:
        """Return the tokens from behind its last cell to the end of the stream."""
        within = (SIDE - 1 - self.row) * SIDE + SIDE - self.column - 5 + 1
        return within + (boards - 1 - self.board) * BOARD


def rows(task: str, split: str) -> list[dict]:
    """Return the rows of a split, eight a stream; each asks for the digits behind another key."""
    made: list[dict] = []
    for number in range(COUNTS[split]):
        facts, _ = _facts(task, split, number)
        shared = {
            "document": f"{split}-{number:06d}",
            "questions": [f"{fact.key}?" for fact in facts],
            "task": task,
            "split": split,
            "number": number,
        }
        made += [
            shared | {"question_number": place, "kind": fact.kind, "answer": fact.digits}
            for place, fact in enumerate(facts)
        ]
    return made


@lru_cache(maxsize=1)
def images(task: str, split: str, number: int) -> list[Image.Image]:
    """Draw a stream's boards, RGB, 224 x 224 pixels. The last stream is kept for its next question."""
    import numpy as np
    from PIL import Image

    from mmkv_bench.tiny.layout import BLANK, distractors
    from mmkv_bench.tiny.pages import draw_look, render

    facts, rng = _facts(task, split, number)
    grids = np.full((TASKS[task][0], SIDE, SIDE), BLANK, np.int64)
    covered = rng.random(grids.shape) < rng.uniform(0.0, 0.6)
    grids[covered] = distractors(rng, int(covered.sum()))
    for fact in facts:
        text = f"{fact.key}{fact.digits}."
        grids[fact.board, fact.row, fact.column : fact.column + 5] = [ord(character) for character in text]
    look = draw_look(split, rng)
    return [Image.fromarray(render(grid, split, look, False, rng)) for grid in grids]


def _facts(task: str, split: str, number: int) -> tuple[list[Fact], np.random.Generator]:
    """Return a stream's facts in the order in which they are asked for, and the generator that draws the rest."""
    from mmkv_bench.tiny import splits
    from mmkv_bench.tiny.vocabulary import KEYS

    boards, ages = TASKS[task]
    rng = splits.generator("streams", task, split, number)
    kinds = ["now"] * NOW + [f"age_{age}" for age in ages]
    facts: list[Fact] = []
    for place, kind in enumerate(kinds):
        key = KEYS[int(rng.integers(len(KEYS)))]
        while any(fact.key == key for fact in facts):
            key = KEYS[int(rng.integers(len(KEYS)))]
        digits, column = "".join(str(int(rng.integers(10))) for _ in range(3)), int(rng.integers(SIDE - 4))
        places = [Fact(key, digits, kind, board, row, column) for board in range(boards) for row in range(SIDE)]
        if kind == "now":
            facts.append(places[-1 - place])
        else:  # the newest place that is old enough
            least = ages[place - NOW] * CAP
            facts.append(min((one for one in places if one.age(boards) >= least), key=lambda one: one.age(boards)))
    return [facts[place] for place in rng.permutation(len(facts))], rng

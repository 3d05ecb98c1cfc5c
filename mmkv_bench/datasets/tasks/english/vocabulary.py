"""Words of the English documents: no name, value or part of a sentence of `train` stands in `dev` or `test`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

SPLITS = {"train": (0, 10), "dev": (10, 20), "test": (10, 20)}
"""The words of every 20 that a split takes; `dev` and `test` are other documents of the same words."""


@cache
def words(name: str, split: str) -> tuple[str, ...]:
    """Return the words of a list of vocabulary.txt (`first_names`, `places`, ...) that belong to `train`, `dev` or `test`."""
    begin, end = SPLITS[split]
    return tuple(word for place, word in enumerate(_lists()[name]) if begin <= place * 7 % 20 < end)


@cache
def _lists() -> dict[str, list[str]]:
    blocks = (Path(__file__).parent / "vocabulary.txt").read_text(encoding="utf-8").strip().split("\n\n")
    named = (block.split(":\n", 1) for block in blocks)
    return {name: [word.strip() for word in listed.replace("\n", " ").split(";")] for name, listed in named}

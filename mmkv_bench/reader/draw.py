"""Random content of documents, split by content: no name, word or value of `train` is in `dev` or `test`.

A hash of a text determines its split. Words come from `words.txt` or are made of syllables; values (dates, sums, ids) are drawn
again until one belongs to the split. Only `random.Random.random` is used, so every Python makes the same content.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

SHARES = {"train": range(14), "dev": range(14, 17), "test": range(17, 20)}
"""Split -> its remainders of a hash modulo 20."""

ONSETS = [
    "b",
    "br",
    "c",
    "ch",
    "cl",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gl",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "qu",
    "r",
    "s",
    "sh",
    "sk",
    "sl",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "y",
    "z",
]
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ee", "oa", "oo", "ou"]
CODAS = [
    "b",
    "ck",
    "d",
    "f",
    "g",
    "ll",
    "m",
    "n",
    "nd",
    "ng",
    "nt",
    "p",
    "r",
    "rd",
    "rk",
    "rm",
    "rn",
    "s",
    "sh",
    "ss",
    "st",
    "t",
    "th",
    "x",
] + [""] * 14
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def split_of(text: str) -> str:
    """Return the split of a name, word or value; case and surrounding spaces are ignored."""
    rest = int.from_bytes(hashlib.sha256(text.strip().lower().encode()).digest()[:4], "big") % 20
    return next(name for name, share in SHARES.items() if rest in share)


@cache
def words(name: str, split: str) -> tuple[str, ...]:
    """Return the words of a split in a list of words.txt (`first_names`, `goods`, ...)."""
    return tuple(word for word in _lists()[name] if split_of(word) == split)


@cache
def _lists() -> dict[str, tuple[str, ...]]:
    blocks = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").strip().split("\n\n")
    named = (block.split(":\n", 1) for block in blocks)
    return {name: tuple(word.strip() for word in listed.replace("\n", " ").split(";")) for name, listed in named}


class Draw:
    """A generator of one document's random content."""

    def __init__(self, seed: str, split: str, extra: Sequence[str] = ()):
        """Start a generator. seed: any text. extra: further words of the split, which sometimes replace names (training has more
        words).
        """
        self._random, self.split, self._extra = random.Random(seed), split, extra

    def share(self) -> float:
        """Return a number in [0, 1)."""
        return self._random.random()

    def below(self, count: int) -> int:
        """Return a whole number from 0 to `count` - 1."""
        return int(self._random.random() * count)

    def one(self, items: Sequence):
        """Return a random item."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence) -> list:
        """Return the items in random order."""
        order = sorted((self._random.random(), place) for place in range(len(items)))
        return [items[place] for _, place in order]

    def value(self, make: Callable[[], str]) -> str:
        """Call `make` until its text belongs to the split, and return the text."""
        while split_of(text := make()) != self.split:
            pass
        return text

    def word(self, name: str, longest: int = 9) -> str:
        """Return a word of the split from a list; sometimes a made-up word or one of the extra words."""
        kind = self.share()
        if self._extra and kind < 0.3:
            text = self.one(self._extra)
        elif kind < 0.5 and name != "verbs":
            text = self.made_up()
        else:
            text = self.one(words(name, self.split))
        return text if len(text) <= longest else self.word(name, longest)

    def made_up(self) -> str:
        """Return a capitalised word of two made-up syllables."""

        def make() -> str:
            parts = [
                self.one(ONSETS),
                self.one(VOWELS),
                self.one(CODAS),
                self.one(ONSETS),
                self.one(VOWELS),
                self.one(CODAS),
            ]
            return "".join(parts).capitalize()

        return self.value(lambda: make()[:9])

    def digits(self, count: int) -> str:
        """Return `count` digits, the first not 0."""
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(count - 1))

    def person(self, longest: int = 14) -> str:
        """Return a first and a last name."""
        while len(name := f"{self.word('first_names')} {self.word('last_names')}") > longest:
            pass
        return name

    def date(self) -> str:
        """Return a day in one of three notations."""
        day, month, year = 1 + self.below(28), self.below(12), 1990 + self.below(45)
        kinds = (
            f"{day} {MONTHS[month]} {year}",
            f"{year}-{month + 1:02d}-{day:02d}",
            f"{day:02d}/{month + 1:02d}/{year % 100:02d}",
        )
        return self.value_again(self.one(kinds), self.date)

    def time(self) -> str:
        """Return a time of day, 24 hours."""
        return self.value(lambda: f"{self.below(24):02d}:{self.below(60):02d}")

    def sum(self, digits: int = 3) -> str:
        """Return an amount with two decimals and up to `digits` digits before them."""
        return self.value(lambda: f"{self.digits(1 + self.below(digits))}.{self.below(100):02d}")

    def code(self) -> str:
        """Return an id such as KX-4471, B72, 4471-K or INV2081."""

        def make() -> str:
            one, two = self.one(LETTERS), self.one(LETTERS)
            return self.one(
                (
                    f"{one}{two}-{self.digits(4)}",
                    f"{one}{self.digits(3)}",
                    f"{self.digits(4)}-{one}",
                    f"{one}{two}{self.digits(3)}",
                )
            )

        return self.value(make)

    def phone(self) -> str:
        """Return a short phone number."""
        return self.value(
            lambda: self.one((f"0{self.digits(3)} {self.digits(3)}", f"{self.digits(3)} {self.digits(4)}"))
        )

    def place_code(self) -> str:
        """Return a platform, room or seat such as 14B."""
        return self.value(lambda: f"{1 + self.below(48)}{self.one('ABCDEFGH')}")

    def count(self) -> str:
        """Return a number of pieces, 2 to 499."""
        return self.value(lambda: str(2 + self.below(98) if self.share() < 0.7 else 100 + self.below(400)))

    def value_again(self, text: str, make: Callable[[], str]) -> str:
        """Return the text if it belongs to the split, otherwise the result of `make`."""
        return text if split_of(text) == self.split else make()

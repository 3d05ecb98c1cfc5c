"""What stands on a page: entries `K384q` in a grid of characters, and the questions they answer.

An entry is an upper-case key, three digits and a lower-case link to another key, or `.` at the end of a chain. All
other cells are blank or distractors (never an upper-case letter, so a key stands on a page once).
Everything here is a pure function of the generator passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmkv_bench.tiny.vocabulary import DIGITS, END, KEYS, LINKS, PUNCTUATION

ENTRY_LENGTH = 5
BLANK = ord(" ")
TRIES = 40  # random places tried per entry
_DISTRACTORS = np.array([ord(character) for character in LINKS + DIGITS + DIGITS + PUNCTUATION])
QUESTION_MARK = {"lookup": "?", "walk": ">", "chain": "*"}


@dataclass(frozen=True)
class Document:
    """One document: grids int64 (images, rows, columns) of ASCII codes; entries map key -> (digits, link)."""

    grids: np.ndarray
    entries: dict[str, tuple[str, str]]

    def hops(self, key: str) -> int:
        """Entries from `key` to the end of its chain, itself included."""
        count = 1
        while self.entries[key][1] != END:
            key, count = self.entries[key][1], count + 1
        return count


def _places(rows: int, columns: int, keys: list[str], rng: np.random.Generator) -> tuple[dict, np.ndarray]:
    """Free places for as many of the keys as fit: {key: (row, column)} and the mask of cells left over."""
    free = np.ones((rows, columns), bool)
    places = {}
    tries = np.stack([rng.integers(0, rows, (len(keys), TRIES)), rng.integers(0, columns - 4, (len(keys), TRIES))], -1)
    for number, key in enumerate(keys):
        for row, column in tries[number].tolist():
            if free[row, column : column + ENTRY_LENGTH].all():
                free[row, column : column + ENTRY_LENGTH] = False
                places[key] = (row, column)
                break
    return places, free


def _links(keys: list[str], longest: int, rng: np.random.Generator) -> dict[str, str]:
    """Chains of 1 to `longest` entries over the keys in order; the first chain has exactly `longest`."""
    links, at, length = {}, 0, longest
    while at < len(keys):
        chain = keys[at : at + length]
        links.update(zip(chain, chain[1:] + [END], strict=True))
        at, length = at + length, int(rng.integers(1, longest + 1))
    return links


def distractors(rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` random characters that no question asks for, ASCII codes."""
    return _DISTRACTORS[rng.integers(0, len(_DISTRACTORS), count)]


def make_document(
    rng: np.random.Generator, rows: int, columns: int, images: int, entries: int, density: float, longest: int = 3
) -> Document:
    """`images` pages of rows x columns cells that share one set of keys.

    density: share of the cells outside entries that carry a distractor. Fewer entries are placed when they do not
    fit, but never fewer than `longest`: then a new draw is made.
    """
    while True:
        keys = [KEYS[index] for index in rng.permutation(len(KEYS))[:entries]]
        drawn = [_places(rows, columns, keys[image::images], rng) for image in range(images)]
        placed = [key for places, _ in drawn for key in places]
        if len(placed) >= max(2, longest):
            break
    order = [placed[index] for index in rng.permutation(len(placed))]
    links = _links(order, longest, rng)
    digits = rng.integers(0, 10, (len(placed), 3))
    content = {key: ("".join(map(str, digits[index].tolist())), links[key]) for index, key in enumerate(placed)}
    grids = np.full((images, rows, columns), BLANK, np.int64)
    for grid, (places, free) in zip(grids, drawn, strict=True):
        mask = free & (rng.random((rows, columns)) < density)
        grid[mask] = distractors(rng, int(mask.sum()))
        for key, (row, column) in places.items():
            text = key + content[key][0] + content[key][1].lower()
            grid[row, column : column + ENTRY_LENGTH] = [ord(character) for character in text]
    return Document(grids, content)


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and per answer character the cell it is read from as (key, offset in the entry)."""

    question: str
    answer: str
    sources: tuple[tuple[str, int], ...]


def ask(document: Document, kind: str, hops: int, rng: np.random.Generator) -> Turn:
    """A question of kind 'lookup', 'walk' or 'chain' about a random key (walk, chain: one with `hops` entries left)."""
    keys = [key for key in document.entries if kind == "lookup" or document.hops(key) == hops]
    if not keys:
        raise ValueError(
            f"no key with {hops} hops left among {document.entries}; make the document with longest={hops}"
        )
    key = keys[int(rng.integers(len(keys)))]
    question = key + QUESTION_MARK[kind]
    if kind == "lookup":
        return Turn(question, document.entries[key][0], tuple((key, offset) for offset in (1, 2, 3)))
    answer, sources = "", []
    while key != END:
        digits, link = document.entries[key]
        answer += (digits if kind == "walk" else "") + link.lower()
        sources += [(key, offset) for offset in ((1, 2, 3, 4) if kind == "walk" else (4,))]
        key = link
    return Turn(question, answer, tuple(sources))

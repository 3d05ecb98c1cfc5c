"""Token sequences of the embedded model: prompts, training labels, mrope positions, auxiliary targets.

A prompt is what the chat template makes of one user message with the images first and the question after them; a
test holds both equal. Training sequences carry several question turns about one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmkv_bench.tiny import vocabulary as v
from mmkv_bench.tiny.layout import ENTRY_LENGTH, Turn
from mmkv_bench.tiny.vocabulary import ID, KEYS

IGNORED = -100
SOURCES = 1 + len(KEYS) * ENTRY_LENGTH  # classes of the auxiliary loss: 0 is none, then (key, offset)
_TOKEN_OF_CODE = np.array([ID.get(chr(code), -1) for code in range(128)])
_NEWLINE = ID["\n"]


def tokens_of(grids: np.ndarray) -> np.ndarray:
    """ASCII codes of page cells -> token ids, same shape."""
    return _TOKEN_OF_CODE[grids]


def source_class(key: str, offset: int) -> int:
    """Class of the cell `offset` places right of `key` in the auxiliary loss."""
    return 1 + KEYS.index(key) * ENTRY_LENGTH + offset


def cell_sources(grids: np.ndarray) -> np.ndarray:
    """Auxiliary class of every page cell: int (images, rows, columns) of ASCII codes -> same shape."""
    classes = np.zeros_like(grids)
    numbers = np.full(128, -1)
    numbers[[ord(key) for key in KEYS]] = np.arange(len(KEYS))
    keys = numbers[grids]
    for offset in range(ENTRY_LENGTH):
        head = keys[..., : grids.shape[-1] - offset]
        classes[..., offset:][head >= 0] = 1 + head[head >= 0] * ENTRY_LENGTH + offset
    return classes


@dataclass(frozen=True)
class TokenSequence:
    """One sequence: ids and labels int64 (length,), positions int64 (3, length), sources int64 (length,).

    labels[t] is the token itself where an answer is supervised, else IGNORED; sources[t] is the auxiliary class of the
    cell that the token after t is read from, else IGNORED.
    """

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    sources: np.ndarray


def make_sequence(rows: int, columns: int, images: int, turns: Sequence[Turn]) -> TokenSequence:
    """The sequence of `images` pages of rows x columns cells followed by the turns (question and answer each)."""
    ids: list[int] = [v.IM_START, ID["user"], _NEWLINE]
    positions: list[np.ndarray] = [np.tile(np.arange(3), (3, 1))]
    following = 3

    def text(tokens: list[int]) -> None:
        nonlocal following
        ids.extend(tokens)
        positions.append(np.tile(np.arange(following, following + len(tokens)), (3, 1)))
        following += len(tokens)

    row, column = np.divmod(np.arange(rows * columns), columns)
    for _ in range(images):
        text([v.VISION_START])
        ids.extend([v.IMAGE_PAD] * (rows * columns))
        positions.append(np.stack([np.zeros_like(row), row, column]) + following)
        following += max(rows, columns)
        text([v.VISION_END])
    answers: list[tuple[int, Turn]] = []
    for number, turn in enumerate(turns):
        if number:
            text([_NEWLINE, v.IM_START, ID["user"], _NEWLINE])
        text([ID[c] for c in turn.question] + [v.IM_END, _NEWLINE, v.IM_START, ID["assistant"], _NEWLINE])
        answers.append((len(ids), turn))
        text([ID[c] for c in turn.answer] + [v.IM_END])
    tokens = np.array(ids)
    labels, sources = np.full(len(ids), IGNORED), np.full(len(ids), IGNORED)
    for start, turn in answers:
        end = start + len(turn.answer) + 1
        labels[start:end] = tokens[start:end]
        sources[start - 1 : end - 2] = [source_class(*source) for source in turn.sources]
    return TokenSequence(tokens, labels, np.concatenate(positions, 1), sources)

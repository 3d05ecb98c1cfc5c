"""Glyph cells of 28 x 28 px: one cell becomes exactly one visual token (patch 14, merge 2).

A rendering is a combination (character, typeface, size, dx, dy). Each combination belongs to one split, decided by
its hash (splits.hashed_split). The held-out typeface belongs to `test_typeface` alone. Combinations of two splits may
look the same: hinting moves outlines to whole pixels (`seen_in_training`).
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmkv_bench.tiny import splits
from mmkv_bench.tiny.vocabulary import PAGE_CHARACTERS

CELL = 28
FACES = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold")
HELD_OUT_FACE = "DejaVuSerif-Bold"
SIZES = (20, 21, 22, 23)  # px per em
DX = tuple(step / 2 for step in range(-5, 6))  # px from the centred position, sub-pixel rendered
DY = (-1, 0, 1)  # px from the common baseline
BASELINE = 22


class Rendering(NamedTuple):
    """One way to draw one character."""

    character: str
    face: str
    size: int
    dx: float
    dy: int


def split_of(rendering: Rendering) -> str:
    """The only split whose pages may show this rendering."""
    if rendering.face == HELD_OUT_FACE:
        return "test_typeface"
    return splits.hashed_split(*rendering)


def faces_of(split: str) -> tuple[str, ...]:
    """Typefaces a split's pages are set in."""
    return (HELD_OUT_FACE,) if split == "test_typeface" else FACES


def renderings(character: str, face: str, split: str) -> list[Rendering]:
    """All renderings of a character in a typeface that belong to `split`, in a fixed order."""
    grid = (Rendering(character, face, *rest) for rest in itertools.product(SIZES, DX, DY))
    return [rendering for rendering in grid if split_of(rendering) == split]


@cache
def _font(face: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def draw(rendering: Rendering) -> np.ndarray:
    """Ink coverage of one glyph cell: uint8 (28, 28), 0 is paper and 255 is full ink."""
    font = _font(rendering.face, rendering.size)
    image = Image.new("L", (CELL, CELL), 0)
    pen = ImageDraw.Draw(image)
    left = (CELL - pen.textlength(rendering.character, font=font)) / 2 + rendering.dx
    pen.text((left, BASELINE + rendering.dy), rendering.character, fill=255, font=font, anchor="ls")
    return np.asarray(image)


class Bank:
    """All glyph cells of one split in one array, for indexing by (character, typeface, random number)."""

    def __init__(self, split: str) -> None:
        self.faces = faces_of(split)
        cells: list[np.ndarray] = [np.zeros((CELL, CELL), np.uint8)]  # cell 0 is the blank
        self.start = np.zeros((128, len(self.faces)), np.int64)  # by ASCII code
        self.count = np.ones((128, len(self.faces)), np.int64)  # characters without glyphs stay blank
        for character in PAGE_CHARACTERS:
            for number, face in enumerate(self.faces):
                chosen = renderings(character, face, split)
                self.start[ord(character), number] = len(cells)
                self.count[ord(character), number] = len(chosen)
                cells.extend(draw(rendering) for rendering in chosen)
        self.cells = np.stack(cells)

    def pick(self, codes: np.ndarray, face: np.ndarray | int, rng: np.random.Generator) -> np.ndarray:
        """A random rendering per cell: ASCII codes int (...) and typeface numbers -> uint8 (..., 28, 28)."""
        draws = rng.random(codes.shape)
        index = self.start[codes, face] + (draws * self.count[codes, face]).astype(np.int64)
        return self.cells[index]


def seen_in_training(cells: np.ndarray, training: np.ndarray) -> float:
    """Share of the glyph cells, uint8 (n, 28, 28), that are pixel for pixel one of the training cells (m, 28, 28)."""
    seen = {cell.tobytes() for cell in training}
    return sum(cell.tobytes() in seen for cell in cells) / len(cells)


@cache
def bank(split: str) -> Bank:
    """The split's bank, drawn on first use (train: about 37,000 cells, 29 MB, a few seconds)."""
    return Bank(split)

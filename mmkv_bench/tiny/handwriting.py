"""Handwritten digits: the 1797 UCI scans that scikit-learn carries, 8 x 8 px, enlarged into page cells.

A scan belongs to one split, decided by the hash of its index.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

from mmkv_bench.tiny import splits
from mmkv_bench.tiny.glyphs import CELL

VARIANTS = {"train": 24, "dev": 12, "test": 12}  # placements drawn per scan
SIDES = (20, 26)  # px, width and height drawn apart, both inclusive
SHIFT = 2  # px from the centred position
TURN = 10  # degrees, training scans only (augmentation)


@cache
def _scans() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images * 255 / 16).round().astype(np.uint8), data.target


def scan_indices(split: str) -> list[int]:
    """Indices into load_digits() that the split's pages may show."""
    return [index for index in range(len(_scans()[1])) if splits.hashed_split("scan", index) == split]


def draw(index: int, rng: np.random.Generator, turn: bool) -> np.ndarray:
    """Ink coverage of one scan, enlarged and shifted at random: uint8 (28, 28)."""
    width, height = (int(side) for side in rng.integers(SIDES[0], SIDES[1] + 1, 2))
    dx, dy = (int(shift) for shift in rng.integers(-SHIFT, SHIFT + 1, 2))
    angle = int(rng.integers(-TURN, TURN + 1)) if turn else 0
    scan = Image.fromarray(_scans()[0][index]).resize((width, height), Image.Resampling.BICUBIC)
    if angle:
        scan = scan.rotate(angle, Image.Resampling.BICUBIC)
    cell = Image.new("L", (CELL, CELL), 0)
    cell.paste(scan, ((CELL - width) // 2 + dx, (CELL - height) // 2 + dy))
    return np.asarray(cell)


class ScanBank:
    """All placements of one split's scans in one array, for indexing by (digit, random number)."""

    def __init__(self, split: str) -> None:
        rng = splits.generator("scan placements", split)
        cells: list[np.ndarray] = []
        self.start = np.zeros(10, np.int64)
        self.count = np.zeros(10, np.int64)
        labels = _scans()[1]
        for digit in range(10):
            self.start[digit] = len(cells)
            for index in scan_indices(split):
                if labels[index] == digit:
                    cells.extend(draw(index, rng, turn=split == "train") for _ in range(VARIANTS[split]))
            self.count[digit] = len(cells) - self.start[digit]
        self.cells = np.stack(cells)

    def pick(self, digits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A random placement of a random scan per digit: int (n,) -> uint8 (n, 28, 28)."""
        return self.cells[self.start[digits] + (rng.random(digits.shape) * self.count[digits]).astype(np.int64)]


@cache
def scan_bank(split: str) -> ScanBank:
    """The split's scans, placed on first use."""
    return ScanBank(splits.rendering_split(split))

"""Pages as images and questions about them: `make_sample` is a pure function of its arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.tiny import splits
from mmkv_bench.tiny.glyphs import CELL, bank
from mmkv_bench.tiny.handwriting import scan_bank
from mmkv_bench.tiny.layout import Document, Turn, ask, make_document

TASKS = (
    "lookup",
    "walk3",
    "chain3",
    "mi_lookup",
    "mi_walk3",
    "handwritten",
    "redundant_lookup",
    "redundant_walk3",
)
SIZES = {"small": 16, "large": 24}  # cells per side of the whole page
ENTRIES = {"small": 16, "large": 20}
REDUNDANT_ENTRIES = {"small": 5, "large": 8}
FRAMES = 4  # images of a cut page, and frames of a redundant one
COLOUR_BINS = {"train": (0, 1, 2), "dev": (3,), "test": (4,)}  # residues modulo 5 of every colour level
INK_LEVELS, PAPER_LEVELS = (0, 90), (190, 255)
NOISE = 16  # largest noise amplitude, in grey levels


@dataclass(frozen=True)
class Sample:
    """One question: RGB images in reading order, the question's text and the expected answer.

    cluster names the page; questions about one page share it (here every question has a page of its own).
    """

    sample_id: str
    cluster: str
    task: str
    images: list[Image.Image]
    question: str
    answer: str


@dataclass(frozen=True)
class Look:
    """How one page is drawn: typeface number, ink and paper colour int (3,), noise amplitude in grey levels."""

    face: int
    ink: np.ndarray
    paper: np.ndarray
    noise: int


def draw_look(split: str, rng: np.random.Generator) -> Look:
    """A random look whose colours belong to the split."""
    bins = COLOUR_BINS[splits.rendering_split(split)]
    levels = []
    for low, high in (INK_LEVELS, PAPER_LEVELS):
        allowed = np.array([level for level in range(low, high + 1) if level % 5 in bins])
        levels.append(allowed[rng.integers(0, len(allowed), 3)])
    return Look(int(rng.integers(len(bank(split).faces))), *levels, noise=int(rng.integers(0, NOISE + 1)))


def render(grid: np.ndarray, split: str, look: Look, handwritten: bool, rng: np.random.Generator) -> np.ndarray:
    """One page of ASCII codes (rows, columns) -> uint8 (28 * rows, 28 * columns, 3). Integer arithmetic only."""
    rows, columns = grid.shape
    cells = bank(split).pick(grid, look.face, rng)
    if handwritten:
        digit = (grid >= ord("0")) & (grid <= ord("9"))
        cells[digit] = scan_bank(split).pick(grid[digit] - ord("0"), rng)
    ink = cells.transpose(0, 2, 1, 3).reshape(rows * CELL, columns * CELL).astype(np.int32)
    noise = rng.integers(-look.noise, look.noise + 1, ink.shape, dtype=np.int32)
    channels = [paper + (dark - paper) * ink // 255 + noise for dark, paper in zip(look.ink, look.paper, strict=True)]
    return np.clip(np.stack(channels, -1), 0, 255).astype(np.uint8)


def _document(task: str, size: str, rng: np.random.Generator) -> Document:
    side = SIZES[size]
    if task.startswith("redundant_"):
        return make_document(rng, side // 2, side // 2, 1, REDUNDANT_ENTRIES[size], density=0.0)
    density = float(rng.uniform(0.0, 0.6))
    if task.startswith("mi_"):
        return make_document(rng, side // 2, side // 2, FRAMES, ENTRIES[size], density)
    return make_document(rng, side, side, 1, ENTRIES[size], density)


def make_page(task: str, size: str, split: str, index: int) -> tuple[Document, Turn, list[np.ndarray]]:
    """The document, question and images (uint8 (h, w, 3)) behind `make_sample`, for tests and for fast evaluation."""
    for name, value, allowed in (("task", task, TASKS), ("size", size, tuple(SIZES)), ("split", split, splits.SPLITS)):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is not a {name} of the pages; {nearest(str(value), allowed)}")
    if index < 0:
        raise ConfigError(f"index={index} is negative; samples are numbered from 0")
    rng = splits.generator("sample", task, size, split, index)
    document = _document(task, size, rng)
    kind = {"lookup": "lookup", "handwritten": "lookup", "walk3": "walk", "chain3": "chain"}[task.split("_")[-1]]
    turn = ask(document, kind, 3, rng)
    look = draw_look(split, rng)
    repeats = FRAMES if task.startswith("redundant_") else 1
    grids = [grid for grid in document.grids for _ in range(repeats)]
    return document, turn, [render(grid, split, look, task == "handwritten", rng) for grid in grids]


def make_sample(task: str, size: str, split: str, index: int) -> Sample:
    """Sample number `index` of a task, the same on every machine and in every call order.

    task: one of TASKS; size: 'small' (16 x 16 cells) or 'large' (24 x 24), multi-image and redundant tasks as four
    images of half the side; split: 'train', 'dev', 'test' or 'test_typeface' (a typeface never trained on).
    Raises ConfigError for anything else.
    """
    _, turn, images = make_page(task, size, split, index)
    name = f"{task}-{size}-{split}-{index:06d}"
    return Sample(name, name, task, [Image.fromarray(image) for image in images], turn.question, turn.answer)

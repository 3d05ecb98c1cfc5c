"""What calibrations read: pages drawn like those of the training split, never test pages, and where answers stand on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import CalibrationError, UnsupportedError, nearest

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from mmkv_bench.tiny.layout import Document

SPLITS = ("train", "dev")
Cell = tuple[int, int, int]
"""Image, row and column of one glyph cell, from 0."""


@dataclass(frozen=True)
class Page:
    """One sample and, per character of its answer, the cells that show it (one per frame of a redundant page).

    grid: rows and columns of cells of every image.
    """

    sample_id: str
    images: list[Image.Image]
    question: str
    answer: str
    sources: tuple[tuple[Cell, ...], ...]
    grid: tuple[int, int]

    def messages(self) -> list[dict[str, Any]]:
        """The chat message: the images, then the question."""
        content = [{"type": "image"} for _ in self.images] + [{"type": "text", "text": self.question}]
        return [{"role": "user", "content": content}]


def pages(kinds: Sequence[str], size: str, split: str, count: int) -> list[tuple[str, str, str, int]]:
    """The first `count` samples of the kinds in turn: arguments of `page`, so that each is drawn when it is read.

    Raises:
        CalibrationError: a test split, no sample.
    """
    if split not in SPLITS:
        raise CalibrationError(f"split={split!r} cannot be calibrated on; {nearest(str(split), SPLITS)}")
    if count < 1:
        raise CalibrationError(f"samples={count} measures nothing; allowed: 1 or more")
    return [(kinds[i % len(kinds)], size, split, i // len(kinds)) for i in range(count)]


def page(kind: str, size: str, split: str, index: int) -> Page:
    """One sample, drawn anew; the same on every machine."""
    from PIL import Image

    from mmkv_bench.tiny.pages import FRAMES, make_page

    document, turn, images = make_page(kind, size, split, index)
    repeats = FRAMES if kind.startswith("redundant_") else 1
    keys = _key_cells(document)
    sources = tuple(
        tuple((keys[key][0] * repeats + frame, keys[key][1], keys[key][2] + offset) for frame in range(repeats))
        for key, offset in turn.sources
    )
    name = f"{kind}-{size}-{split}-{index:06d}"
    shown = [Image.fromarray(image) for image in images]
    return Page(name, shown, turn.question, turn.answer, sources, document.grids.shape[1:])


def _key_cells(document: Document) -> dict[str, Cell]:
    """Where every key stands; a key is the only upper-case letter of its kind in a document."""
    return {key: tuple(int(axis[0]) for axis in (document.grids == ord(key)).nonzero()) for key in document.entries}


def visual_tokens(cells: Sequence[Cell], grid: tuple[int, int], merged: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers (from 0, in prompt order) of the visual tokens that show any part of the given cells.

    Args:
        cells: of one answer character or several; grid: rows and columns of cells of every image.
        merged: rows and columns of visual tokens of every image, which cover it evenly.
    """
    starts = [sum(rows * columns for rows, columns in merged[:image]) for image in range(len(merged))]
    found = set()
    for image, row, column in cells:
        rows, columns = merged[image]
        down, right = _overlap(row, grid[0], rows), _overlap(column, grid[1], columns)
        found |= {starts[image] + y * columns + x for y in down for x in right}
    return sorted(found)


def _overlap(index: int, cells: int, tokens: int) -> range:
    """Which of `tokens` equal parts of a line touch part `index` of `cells` equal ones."""
    return range(index * tokens // cells, -(-(index + 1) * tokens // cells))


def token_grids(inputs: dict[str, Tensor], model: Any, visual: int) -> list[tuple[int, int]]:
    """Rows and columns of visual tokens of every image, from what the processor says.

    Args:
        inputs: of one prompt; model: whose vision tower merges patches; visual: visual tokens of the prompt.

    Raises:
        UnsupportedError: a family whose visual tokens are no even grid over each image.
    """
    grids, merge = inputs.get("image_grid_thw"), getattr(model.config.vision_config, "spatial_merge_size", None)
    if grids is not None and merge:
        found = [(int(h) // merge, int(w) // merge) for _, h, w in grids.tolist()]
        if sum(rows * columns for rows, columns in found) == visual:
            return found
    raise UnsupportedError(
        f"the visual tokens of {type(model).__name__} are no even grid over each image, so a glyph's tokens are unknown; "
        "visual head scores can be measured for the Qwen-VL families"
    )

"""Boxes and number of visual tokens of images that are cut into tiles and patches.

A patch of the vision tower covers a square of pixels of the image processor's output. The token's box is the part of the original
image in this square. Attention in the tower and blending of neighbouring pixels do not enlarge a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from mmkv_bench.families.base import Box, Settings, Size

Span = tuple[Any, Any]
"""Start and end on one axis: pixels of the processor's output, or parts of an image's height or width."""
POOLINGS = ("average", "bilinear")
"""Ways to pool 2x2 features of a LLaVA-Video frame into one."""


def grid(
    image: int, rows: Sequence[Span | None], columns: Sequence[Span | None], newline: bool = False
) -> list[Box | None]:
    """Return the boxes of a grid of tokens, row by row.

    Args:
        image: index of the image in the prompt.
        rows: the span of the image's height that each row of tokens shows; None: outside of the image.
        columns: likewise the span of the image's width for each column.
        newline: each row ends with a token that shows no part of the image.
    """
    boxes: list[Box | None] = []
    for row in rows:
        boxes += [Box(image, *row, *column) if row and column else None for column in columns]
        boxes += [None] * newline
    return boxes


def tile_after_tile(
    image: int, rows: int, columns: int, spans: Callable[[int], Sequence[Span | None]]
) -> list[Box | None]:
    """Return the boxes of an image tile by tile; after several tiles, the whole image follows as one more tile.

    Args:
        image: index of the image in the prompt.
        rows, columns: numbers of tiles.
        spans: maps a number of tiles side by side to the spans of the image that their tokens show.
    """
    row_spans, column_spans, image_spans = spans(rows), spans(columns), spans(1)
    side, boxes = len(image_spans), list[Box | None]()
    for row in range(rows):
        for column in range(columns):
            tile = row_spans[row * side : (row + 1) * side], column_spans[column * side : (column + 1) * side]
            boxes += grid(image, *tile)
    return boxes + grid(image, image_spans, image_spans) if rows * columns > 1 else boxes


def even(count: int) -> list[Span]:
    """Divide a height or width into `count` equal spans, as fractions of the whole."""
    return [(Fraction(i, count), Fraction(i + 1, count)) for i in range(count)]


def patches(edge: int, patch: int, tiles: int = 1) -> list[Span]:
    """Return the (start, end) pixels of every whole patch along `tiles` tiles side by side, each `edge` pixels long."""
    return [(t * edge + i * patch, t * edge + (i + 1) * patch) for t in range(tiles) for i in range(edge // patch)]


def parts(pixels: Sequence[Span], start: Any, length: Any) -> list[Span | None]:
    """Convert spans of pixels to fractions of an image that begins at pixel `start` and is `length` pixels long.

    A span outside of the image becomes None.
    """
    zero, one = Fraction(0), Fraction(1)
    spans = [
        (max(Fraction(first - start) / length, zero), min(Fraction(last - start) / length, one))
        for first, last in pixels
    ]
    return [span if span[0] < span[1] else None for span in spans]


class Tiling(NamedTuple):
    """The tokens of an image that is cut into AnyRes tiles.

    Attributes:
        padded: width and height that the image is scaled and padded to.
        cut: rows of patches at the top, and columns at the left, that are padding. As many are padding at the bottom and right.
        shape: rows and columns of tokens without padding, and without the newline token after each row.
    """

    padded: Size
    cut: tuple[int, int]
    shape: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Number of tokens, newlines included."""
        return self.shape[0] * (self.shape[1] + 1)


def anyres(
    resolutions: Sequence[Sequence[int]], edge: int, per_tile: int, size: Size, most_tiles: int | None = None
) -> Tiling:
    """Return how an image is cut into AnyRes tiles.

    Args:
        resolutions: allowed (height, width) in pixels.
        edge: side of a tile in pixels.
        per_tile: patches per side of a tile.
        size: width and height of the image in pixels.
        most_tiles: an image with over 1.21 times the patches of this many tiles is interpolated to fewer rows and columns;
            None: never.
    """
    width, height = size
    tiled_height, tiled_width = _best_resolution(resolutions, size)
    rows, columns = per_tile * (tiled_height // edge), per_tile * (tiled_width // edge)
    # The model removes padding by the aspect of patches, the processor added it by the aspect of pixels: not quite equal.
    if width / height > columns / rows:
        padding_cut = (rows - int(round(height * (columns / width), 7))) // 2, 0
    else:
        padding_cut = 0, (columns - int(round(width * (rows / height), 7))) // 2
    rows, columns = rows - 2 * padding_cut[0], columns - 2 * padding_cut[1]
    if most_tiles is not None:
        shrink_factor = math.sqrt(rows * columns / (most_tiles * per_tile**2))
        if shrink_factor > 1.1:
            rows, columns = int(rows // shrink_factor), int(columns // shrink_factor)
    return Tiling((tiled_width, tiled_height), padding_cut, (rows, columns))


def anyres_boxes(image: int, size: Size, tiling: Tiling, edge: int, patch: int) -> list[Box | None]:
    """Return the boxes of an image in AnyRes tiles: first of the whole image squashed into a square, then of its tiles.

    Each row of the tiles ends with a newline token.

    Args:
        image: index of the image in the prompt.
        size: width and height of the image in pixels.
        edge: side of a tile in pixels.
        patch: side of a patch in pixels.
    """
    base_spans = parts(patches(edge, patch), 0, edge)
    scale = min(padded / side for padded, side in zip(tiling.padded, size, strict=True))
    spans = []
    for padded, side, cut, count in zip(tiling.padded, size, tiling.cut[::-1], tiling.shape[::-1], strict=True):
        patch_spans = patches(edge, patch, padded // edge)
        patch_spans = patch_spans[cut : len(patch_spans) - cut]
        image_side = min(math.ceil(side * scale), padded)
        patch_spans = patch_spans if len(patch_spans) == count else _blended(patch_spans, count)
        spans.append(parts(patch_spans, (padded - image_side) // 2, image_side))
    column_spans, row_spans = spans
    return grid(image, base_spans, base_spans) + grid(image, row_spans, column_spans, newline=True)


def pooled_side(side: int, pooling: str) -> int:
    """Return the number of rows (and columns) of a frame's features after pooling. Averaging drops an odd last row.

    side: rows before pooling. pooling: one of `POOLINGS`.
    """
    return side // 2 if pooling == "average" else math.ceil(side / 2)


def video_token_count(frames: int, side: int, pooling: str) -> int:
    """Count the visual tokens of a LLaVA-Video video; a newline ends each row of each frame.

    side: rows and columns of a frame's features before pooling. pooling: one of `POOLINGS`.
    """
    rows = pooled_side(side, pooling)
    return frames * rows * (rows + 1)


def edge_of(part: Mapping[str, Any]) -> int:
    """Return the side in pixels of the square that a vision tower takes, from the settings of an image or video processor."""
    edge_setting = part.get("crop_size") or part["size"]
    return edge_setting["height"] if "height" in edge_setting else edge_setting["shortest_edge"]


def clip_tokens(settings: Settings) -> int:
    """Count the tokens of one square image in a CLIP tower: its patches, and the class token if the model keeps it."""
    processor_settings = settings["processor"]
    class_token = processor_settings["num_additional_image_tokens"] - (
        processor_settings["vision_feature_select_strategy"] == "default"
    )
    return (edge_of(settings["image"]) // processor_settings["patch_size"]) ** 2 + class_token


def _best_resolution(resolutions: Sequence[Sequence[int]], size: Size) -> tuple[int, int]:
    """Return the allowed (height, width) that keeps most pixels of the image; among equals, the one with least padding."""
    width, height = size

    def rank(resolution: Sequence[int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, -(resolution[0] * resolution[1] - pixels)

    best_height, best_width = max(resolutions, key=rank)
    return best_height, best_width


def _blended(spans: Sequence[Span], count: int) -> list[Span]:
    """Return the spans of `count` tokens that are interpolated from tokens with the given spans.

    Each span is interpolated linearly between the two nearest given spans, with half-pixel centres.
    """
    blended = []
    for i in range(count):
        source_position = max(Fraction((2 * i + 1) * len(spans), 2 * count) - Fraction(1, 2), Fraction(0))
        lower_index, upper_index = math.floor(source_position), min(math.ceil(source_position), len(spans) - 1)
        blended.append((spans[lower_index][0], spans[upper_index][1]))
    return blended

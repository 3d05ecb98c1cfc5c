"""Which part of which image every visual token shows, by each family's way of cutting images up.

A patch of the vision tower covers a square of pixels of what the image processor made of an image; followed back through
cropping, tiling, padding and scaling that is a box of the image itself:

    Qwen-VL           an even grid over each image
    LLaVA-1.5         an even grid over the square that is left in the middle when the shorter edge is scaled to the tower's;
                      what lies outside of it no token shows
    LLaVA-NeXT        first the whole image, squashed into a square (even grid); then the image in tiles, scaled with its
                      aspect and padded on both sides, in rows across all tiles, without the rows or columns of padding that
                      the model cuts off, a newline token behind each row
    LLaVA-OneVision,  a single image as LLaVA-NeXT; 384 is no multiple of the patch of 14, so the last 6 pixels of each tile
    LLaVA-Video       lie in no patch; beyond 9 tiles' worth of tokens rows and columns are blended bilinearly, and a token
                      shows all that went into it; several images are each padded to a square, with one newline token
    InternVL          the image squashed into a grid of tiles, tile after tile; then, with more than one tile, the whole as
                      another; 2x2 patches make a token

What a tower mixes by attention, and what scaling bleeds across the border of two patches, is no part of a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]
"""Width and height in pixels."""
Span = tuple[Any, Any]
"""Beginning and end on one axis: pixels of what the processor made, or parts of an image's height or width."""
SIDES = "image sizes, pixel limits and tiles of the checkpoint's own processor files"


class Box(NamedTuple):
    """A part of one image: its number from 0, and exact fractions of its height and width from the upper left corner."""

    image: int
    top: Fraction
    bottom: Fraction
    left: Fraction
    right: Fraction


def token_boxes(
    config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size], visual: int
) -> list[Box | None]:
    """The box of every visual token of a prompt with images and no video, in prompt order.

    Args:
        config: of the whole model; processor: the one that made `inputs`.
        inputs: of one prompt; sizes: of its images, in order.
        visual: visual tokens of the prompt.

    Returns:
        `visual` boxes; None for a token that shows no place: a newline, or nothing but padding.

    Raises:
        UnsupportedError: a family that is not among the above, or a processor with settings that cut otherwise.
    """
    rule = _RULES.get(config.model_type)
    if rule is None:
        raise UnsupportedError(
            f"which part of an image the visual tokens of a {config.model_type} model show is unknown; known: "
            f"{', '.join(_RULES)}"
        )
    boxes = rule(config, processor, inputs, sizes)
    if len(boxes) != visual:
        raise UnsupportedError(
            f"images of {', '.join(f'{w}x{h}' for w, h in sizes)} have {len(boxes)} tokens by the rule of {config.model_type} "
            f"models and {visual} in the prompt, so their places are unknown; allowed: {SIDES}"
        )
    return boxes


def _grid(
    image: int, rows: Sequence[Span | None], columns: Sequence[Span | None], newline: bool = False
) -> list[Box | None]:
    """Tokens row by row; rows, columns: parts of the image's height and width, None where nothing of it is."""
    boxes: list[Box | None] = []
    for row in rows:
        boxes += [Box(image, *row, *column) if row and column else None for column in columns]
        boxes += [None] * newline
    return boxes


def _even(count: int) -> list[Span]:
    """`count` equal parts of the whole."""
    return [(Fraction(i, count), Fraction(i + 1, count)) for i in range(count)]


def _patches(edge: int, patch: int, tiles: int = 1) -> list[Span]:
    """Pixels of the whole patches of each of `tiles` tiles side by side."""
    return [(t * edge + i * patch, t * edge + (i + 1) * patch) for t in range(tiles) for i in range(edge // patch)]


def _parts(pixels: Sequence[Span], start: Any, length: Any) -> list[Span | None]:
    """Pixels as parts of an image that begins at pixel `start` and is `length` pixels long; None beside the image."""
    found = []
    for first, last in pixels:
        low, high = (
            max(Fraction(first - start) / length, Fraction(0)),
            min(Fraction(last - start) / length, Fraction(1)),
        )
        found.append((low, high) if low < high else None)
    return found


def _edge(config: Any, processor: Any) -> int:
    """Side in pixels of the square that the tower takes, the same as that of what the processor makes.

    Raises:
        UnsupportedError: they differ, or images are not scaled.
    """
    part, edge = processor.image_processor, config.vision_config.image_size
    edge = edge if isinstance(edge, int) else edge[0]
    sides = {value for size in (part.size, getattr(part, "crop_size", None)) for _, value in dict(size or {}).items()}
    if sides != {edge} or not part.do_resize:
        raise UnsupportedError(
            f"the image processor scales to {dict(part.size)} (do_resize={part.do_resize}) and the vision tower takes {edge} "
            f"pixels, so the places of visual tokens are unknown; allowed: {SIDES}"
        )
    return edge


def _qwen(config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size]) -> list[Box | None]:
    merge = config.vision_config.spatial_merge_size
    grids = [(int(h) // merge, int(w) // merge) for _, h, w in inputs["image_grid_thw"].tolist()]
    return [box for image, (h, w) in enumerate(grids) for box in _grid(image, _even(h), _even(w))]


def _llava(config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size]) -> list[Box | None]:
    part, edge = processor.image_processor, _edge(config, processor)
    if not part.do_center_crop or getattr(part, "do_pad", False) or "shortest_edge" not in dict(part.size):
        raise UnsupportedError(
            f"the image processor has size={dict(part.size)}, do_center_crop={part.do_center_crop}, do_pad="
            f"{getattr(part, 'do_pad', False)}; allowed for a llava model: the shorter edge scaled, the middle cut out"
        )
    patches, boxes = _patches(edge, config.vision_config.patch_size), []
    for image, size in enumerate(sizes):
        columns, rows = (_parts(patches, -((side - edge) // 2), side) for side in (edge * s // min(size) for s in size))
        boxes += _grid(image, rows, columns)
    return boxes


def _next(config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size]) -> list[Box | None]:
    return [box for image, size in enumerate(sizes) for box in _anyres(config, processor, image, size)]


def _onevision(config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size]) -> list[Box | None]:
    if len(sizes) == 1:
        return _anyres(config, processor, 0, sizes[0], int(config.vision_aspect_ratio.removeprefix("anyres_max_")))
    edge, boxes = _edge(config, processor), []
    patches = _patches(edge, config.vision_config.patch_size)
    for image, size in enumerate(sizes):
        scale = Fraction(edge, max(size))
        columns, rows = (_parts(patches, (max(size) - side) // 2 * scale, side * scale) for side in size)
        boxes += [*_grid(image, rows, columns), None]
    return boxes


def _anyres(config: Any, processor: Any, image: int, size: Size, most_tiles: int | None = None) -> list[Box | None]:
    """Of one image: the whole, then the tiled image with newlines.

    most_tiles: how many tiles' worth of tokens the tiled image may have before it is blended; None: any.
    """
    from transformers.image_processing_utils import select_best_resolution

    edge, patch, (width, height) = _edge(config, processor), config.vision_config.patch_size, size
    whole = _parts(_patches(edge, patch), 0, edge)
    target_height, target_width = select_best_resolution((height, width), config.image_grid_pinpoints)
    rows, columns = _patches(edge, patch, target_height // edge), _patches(edge, patch, target_width // edge)
    # The model cuts padding off by the aspect of patches, the processor put it there by that of pixels: not quite the same.
    if width / height > len(columns) / len(rows):
        cut = (len(rows) - int(round(height * (len(columns) / width), 7))) // 2
        rows = rows[cut : len(rows) - cut]
    else:
        cut = (len(columns) - int(round(width * (len(rows) / height), 7))) // 2
        columns = columns[cut : len(columns) - cut]
    if most_tiles is not None:
        excess = math.sqrt(len(rows) * len(columns) / (most_tiles * (edge // patch) ** 2))
        if excess > 1.1:
            rows, columns = _blended(rows, int(len(rows) // excess)), _blended(columns, int(len(columns) // excess))
    scale = min(target_width / width, target_height / height)
    filled = min(math.ceil(width * scale), target_width), min(math.ceil(height * scale), target_height)
    across = _parts(columns, (target_width - filled[0]) // 2, filled[0])
    down = _parts(rows, (target_height - filled[1]) // 2, filled[1])
    return _grid(image, whole, whole) + _grid(image, down, across, newline=True)


def _blended(spans: Sequence[Span], count: int) -> list[Span]:
    """Spans of `count` tokens that are interpolated linearly between the two nearest of the given ones (half-pixel centres)."""
    found = []
    for i in range(count):
        place = max(Fraction((2 * i + 1) * len(spans), 2 * count) - Fraction(1, 2), Fraction(0))
        first, last = math.floor(place), min(math.ceil(place), len(spans) - 1)
        found.append((spans[first][0], spans[last][1]))
    return found


def _internvl(config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size]) -> list[Box | None]:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    part, edge = processor.image_processor, _edge(config, processor)
    side, boxes = math.isqrt(processor.image_seq_length), []
    for image, (width, height) in enumerate(sizes):
        columns, rows = get_optimal_tiled_canvas((height, width), (edge, edge), part.min_patches, part.max_patches)
        down, across = _even(rows * side), _even(columns * side)
        for row in range(rows):
            for column in range(columns):
                tile = down[row * side : (row + 1) * side], across[column * side : (column + 1) * side]
                boxes += _grid(image, *tile)
        if rows * columns > 1:
            boxes += _grid(image, _even(side), _even(side))
    return boxes


_RULES: dict[str, Callable[[Any, Any, Mapping[str, Tensor], Sequence[Size]], list[Box | None]]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "llava": _llava,
    "llava_next": _next,
    "llava_next_video": _next,
    "llava_onevision": _onevision,
    "llava_video": _onevision,
    "internvl": _internvl,
}

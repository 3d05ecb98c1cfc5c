"""How many visual tokens an image or a video becomes: each family's published rule, from the settings of its processor.

No processor, model or picture is needed, so prompt sizes and cache bytes can be known before anything is downloaded:

    python -m mmkv_bench tokens model=qwen2_5_vl_7b 1344x896
    python -m mmkv_bench tokens model=llava_onevision_7b 640x480 model.frames=32

Counted are tokens that are replaced by features, the same as `EncodedPrompt.visual_tokens`; markers around them and the
timestamps of Qwen3-VL are text. Sizes are width x height in pixels. The rules:

    Qwen2-VL, Qwen2.5-VL   arXiv 2409.12191 section 2.1: sides rounded to multiples of 28, area scaled into [min_pixels,
                           max_pixels], one token per 28x28; frames in pairs, each pair as many tokens as one image
    Qwen3-VL               the same with 32x32; a video's limits are of all its frames together
    LLaVA-1.5              arXiv 2310.03744: 336x336 in patches of 14 = 576
    LLaVA-NeXT             blog of 2024-01-30 (AnyRes): the whole at 336x336, and the best-fitting of the grid's resolutions
                           in tiles, without the rows or columns that are padding, with a newline token per row
    LLaVA-NeXT-Video       frames of 24x24 patches pooled by 2x2 = 144
    LLaVA-OneVision        arXiv 2408.03326 section 3.3: 384x384 = 729 tokens a tile, at most 9 tiles' worth of tokens
                           (bilinear beyond), several images 729 and a newline each, frames pooled to 196, one newline
    LLaVA-Video            the released code: images as LLaVA-OneVision; frames pooled to 14x14, or averaged to 13x13 as
                           arXiv 2410.02713 says, with a newline token per row (mm_newline_position=grid)
    InternVL               arXiv 2404.16821 section 3.2: tiles of 448x448 in the grid of the nearest aspect ratio and, with
                           more than one, the whole as another; 256 tokens a tile; a frame is one tile
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmkv_bench.errors import UnsupportedError

Settings = Mapping[str, Any]
"""`model.processor` of a configuration, see models/processors.py."""


@dataclass(frozen=True)
class Limits:
    """Pixel limits of a run (model.min_pixels, model.max_pixels, model.video_max_pixels); None = the checkpoint's."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_max_pixels: int | None = None


NO_LIMITS = Limits()


def image_tokens(
    model_type: str, settings: Settings, width: int, height: int, images: int = 1, limits: Limits = NO_LIMITS
) -> int:
    """Visual tokens of one image of width x height pixels in a prompt of `images` images.

    Raises:
        UnsupportedError: a model without images, or a side more than 200 times the other where a family refuses it.
    """
    rule = _IMAGE.get(model_type)
    if rule is None:
        raise UnsupportedError(f"a {model_type} model takes no images; models that do: {', '.join(_IMAGE)}")
    return rule(settings, width, height, images, limits)


def video_tokens(
    model_type: str, settings: Settings, frames: int, width: int, height: int, limits: Limits = NO_LIMITS
) -> int:
    """Visual tokens of a video of `frames` >= 1 frames, those that are left after sampling, of width x height pixels.

    Raises:
        UnsupportedError: a model without videos, or a side more than 200 times the other where a family refuses it.
    """
    rule = _VIDEO.get(model_type)
    if rule is None:
        raise UnsupportedError(f"a {model_type} model takes no videos; models that do: {', '.join(_VIDEO)}")
    return rule(settings, frames, width, height, limits)


def media_of(model_type: str) -> tuple[str, ...]:
    """What models of a family take: of `image` and `video` those that have a rule here."""
    return tuple(name for name, rules in (("image", _IMAGE), ("video", _VIDEO)) if model_type in rules)


# ---------------------------------------------------------------------- Qwen-VL
def _qwen_image(settings: Settings, width: int, height: int, images: int, limits: Limits) -> int:
    part = settings["image"]
    low, high = area(part)
    unit = part["patch_size"] * part["merge_size"]
    return _units(width, height, unit, limits.min_pixels or low, limits.max_pixels or high)


def _qwen2_video(settings: Settings, frames: int, width: int, height: int, limits: Limits) -> int:
    part = settings["video"]
    low, high = area(part)
    unit, together = part["patch_size"] * part["merge_size"], part["temporal_patch_size"]
    high = limits.video_max_pixels or high
    if part.get("cap_pixels_per_frame"):  # a share of 90% of a context, of each frame
        share = int(part.get("max_video_tokens", 128_000) * unit * unit * 0.9) * together // frames
        high = max(min(high, share), int(low * 1.05))
    return math.ceil(frames / together) * _units(width, height, unit, low, high)


def _qwen3_video(settings: Settings, frames: int, width: int, height: int, limits: Limits) -> int:
    part = settings["video"]
    low, high = area(part)  # of all frames together
    unit, together = part["patch_size"] * part["merge_size"], part["temporal_patch_size"]
    frames = max(frames, together)
    even = round(frames / together) * together
    if limits.video_max_pixels is not None:
        high = limits.video_max_pixels * min(frames, even)
        low = min(low, high)
    if part.get("cap_pixels_per_frame"):
        most = part.get("max_video_tokens", 768) * unit * unit
        high = max(min(most, high // frames), int(low * 1.05)) * frames
    if min(width, height) < unit:
        scale = max(unit / width, unit / height)
        width, height = int(width * scale), int(height * scale)
    return math.ceil(frames / together) * _units(width, height, unit, low, high, frames, even)


def area(part: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most pixels, under either of the names that checkpoints give them."""
    size = part.get("size") or {}
    return part.get("min_pixels") or size["shortest_edge"], part.get("max_pixels") or size["longest_edge"]


def _units(width: int, height: int, unit: int, low: int, high: int, frames: int = 1, even: int = 1) -> int:
    """Squares of unit x unit pixels after scaling: sides rounded to whole units, then the area brought within limits.

    The area is that of `frames` frames; what is compared with the limits counts `even` frames of rounded sides.
    """
    if max(width, height) > 200 * min(width, height):
        raise UnsupportedError(f"{width}x{height}: Qwen-VL takes no side more than 200 times the other")
    sides = [round(side / unit) for side in (width, height)]
    area = even * math.prod(sides) * unit**2
    if area > high:
        shrink = math.sqrt(frames * width * height / high)
        sides = [max(1, math.floor(side / shrink / unit)) for side in (width, height)]
    elif area < low:
        grow = math.sqrt(low / (frames * width * height))
        sides = [math.ceil(side * grow / unit) for side in (width, height)]
    return math.prod(sides)


# ---------------------------------------------------------------------- LLaVA
def _llava_image(settings: Settings, width: int, height: int, images: int, limits: Limits) -> int:
    return _base(settings, _edge(settings["image"]))


def _next_image(settings: Settings, width: int, height: int, images: int, limits: Limits) -> int:
    edge = _edge(settings["image"])
    per_tile = edge // settings["processor"]["patch_size"]
    rows, columns = _unpadded(settings["image"]["image_grid_pinpoints"], edge, per_tile, width, height)
    return _base(settings, edge) + rows * columns + rows


def _next_video(settings: Settings, frames: int, width: int, height: int, limits: Limits) -> int:
    per_side = _edge(settings["video"]) // settings["processor"]["patch_size"]
    return frames * (per_side * per_side // 4)


def _onevision_image(settings: Settings, width: int, height: int, images: int, limits: Limits) -> int:
    part = settings["processor"]
    base = part["num_image_tokens"]
    if images > 1:
        return base + 1
    per_tile = math.isqrt(base)
    rows, columns = _unpadded(
        settings["image"]["image_grid_pinpoints"], _edge(settings["image"]), per_tile, width, height
    )
    tiles = int(part["vision_aspect_ratio"].removeprefix("anyres_max_"))
    ratio = math.sqrt(rows * columns / (tiles * base))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return base + rows * columns + rows


def _onevision_video(settings: Settings, frames: int, width: int, height: int, limits: Limits) -> int:
    pooled = math.ceil(math.isqrt(settings["processor"]["num_image_tokens"]) / 2)
    return frames * pooled * pooled + 1


def _llava_video_video(settings: Settings, frames: int, width: int, height: int, limits: Limits) -> int:
    side, part = math.isqrt(settings["processor"]["num_image_tokens"]), settings["processor"]
    rows = side // 2 if part.get("video_pooling") == "average" else math.ceil(side / 2)
    return frames * rows * (rows + 1)


def _edge(part: Mapping[str, Any]) -> int:
    """Side of the square that a tower takes."""
    size = part.get("crop_size") or part["size"]
    return size["height"] if "height" in size else size["shortest_edge"]


def _base(settings: Settings, edge: int) -> int:
    """Tokens of one square: patches, and the class token unless the tower's features come without it."""
    part = settings["processor"]
    dropped = 1 if part["vision_feature_select_strategy"] == "default" else 0
    return (edge // part["patch_size"]) ** 2 + part["num_additional_image_tokens"] - dropped


def _unpadded(grid: Sequence[Sequence[int]], edge: int, per_tile: int, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of features of the tiled image after its padding is cut off."""
    best_height, best_width = _best_resolution(grid, width, height)
    rows, columns = per_tile * (best_height // edge), per_tile * (best_width // edge)
    if width / height > columns / rows:
        filled = int(round(height * (columns / width), 7))
        return rows - (rows - filled) // 2 * 2, columns
    filled = int(round(width * (rows / height), 7))
    return rows, columns - (columns - filled) // 2 * 2


def _best_resolution(grid: Sequence[Sequence[int]], width: int, height: int) -> tuple[int, int]:
    """(height, width) of the grid that keeps most of the image's pixels, of these the one with the least padding."""

    def rank(resolution: Sequence[int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, -(resolution[0] * resolution[1] - kept)

    best_height, best_width = max(grid, key=rank)
    return best_height, best_width


# ---------------------------------------------------------------------- InternVL
def _intern_image(settings: Settings, width: int, height: int, images: int, limits: Limits) -> int:
    part = settings["image"]
    tiles = _tiles(part, width, height) if part.get("crop_to_patches", True) else 1
    return settings["processor"]["image_seq_length"] * (tiles + (tiles > 1))


def _intern_video(settings: Settings, frames: int, width: int, height: int, limits: Limits) -> int:
    return settings["processor"]["image_seq_length"] * frames


def _tiles(part: Mapping[str, Any], width: int, height: int) -> int:
    """Tiles of the grid whose aspect ratio is nearest; of equally near ones a larger, while the image fills half of it."""
    low, high = part.get("min_patches", 1), part.get("max_patches", 12)
    tile = part["size"]["height"] * part["size"]["width"]
    grids = [(c, r) for c in range(1, high + 1) for r in range(1, high + 1) if low <= c * r <= high]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * tile * columns * rows):
            best, nearest = (columns, rows), distance
    return math.prod(best)


_IMAGE: dict[str, Callable[[Settings, int, int, int, Limits], int]] = {
    "qwen2_vl": _qwen_image,
    "qwen2_5_vl": _qwen_image,
    "qwen3_vl": _qwen_image,
    "llava": _llava_image,
    "llava_next": _next_image,
    "llava_next_video": _next_image,
    "llava_onevision": _onevision_image,
    "llava_video": _onevision_image,
    "internvl": _intern_image,
}
_VIDEO: dict[str, Callable[[Settings, int, int, int, Limits], int]] = {
    "qwen2_vl": _qwen2_video,
    "qwen2_5_vl": _qwen2_video,
    "qwen3_vl": _qwen3_video,
    "llava_next_video": _next_video,
    "llava_onevision": _onevision_video,
    "llava_video": _llava_video_video,
    "internvl": _intern_video,
}

"""Qwen-VL: images keep their aspect; their area is scaled between two limits and cut into squares, one token each.

Qwen2-VL, Qwen2.5-VL   arXiv 2409.12191 section 2.1: sides rounded to multiples of 28, area scaled into [min_pixels,
                       max_pixels], one token per 28x28; a pair of frames has as many tokens as one image
Qwen3-VL               likewise with 32x32; a video's limits are for all its frames together
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import SIDES, Box, Family, ImagePrompt, PixelLimits, Settings, Size, TextModel
from mmkv_bench.families.tiles import even, grid


class QwenVL(Family):
    """Rules shared by Qwen2-VL and Qwen2.5-VL."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        image_settings = settings["image"]
        min_pixels, max_pixels = area(image_settings)
        return _squares(size, _side(image_settings), limits.min_pixels or min_pixels, limits.max_pixels or max_pixels)

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        video_settings = settings["video"]
        min_pixels, max_pixels = area(video_settings)
        side, pair = _side(video_settings), video_settings["temporal_patch_size"]
        max_pixels = limits.video_max_pixels or max_pixels
        if video_settings.get("cap_pixels_per_frame"):  # a share of 90% of a context, of each frame
            pixels_per_frame = int(video_settings.get("max_video_tokens", 128_000) * side * side * 0.9) * pair // frames
            max_pixels = max(min(max_pixels, pixels_per_frame), int(min_pixels * 1.05))
        return math.ceil(frames / pair) * _squares(size, side, min_pixels, max_pixels)

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        """Return the boxes of all visual tokens, which form an even grid over each image."""
        merge = prompt.config.vision_config.spatial_merge_size
        grids = [(int(h) // merge, int(w) // merge) for _, h, w in prompt.inputs["image_grid_thw"].tolist()]
        return [box for image, (h, w) in enumerate(grids) for box in grid(image, even(h), even(w))]

    def shrink_vision(self, values: dict[str, Any], layers: int) -> None:
        super().shrink_vision(values, layers)
        vision = values["vision_config"]
        full_attention_blocks = vision.get("fullatt_block_indexes")
        if full_attention_blocks is not None:  # the last block has full attention in every checkpoint
            depth = vision["depth"]
            vision["fullatt_block_indexes"] = sorted({i for i in full_attention_blocks if i < depth} | {depth - 1})


class Qwen3VL(QwenVL):
    """Rules of Qwen3-VL that differ."""

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        video_settings = settings["video"]
        min_pixels, max_pixels = area(video_settings)  # of all frames together
        side, pair = _side(video_settings), video_settings["temporal_patch_size"]
        frames = max(frames, pair)
        whole_pairs = round(frames / pair) * pair
        if limits.video_max_pixels is not None:
            max_pixels = limits.video_max_pixels * min(frames, whole_pairs)
            min_pixels = min(min_pixels, max_pixels)
        if video_settings.get("cap_pixels_per_frame"):
            max_pixels_per_frame = video_settings.get("max_video_tokens", 768) * side * side
            max_pixels = max(min(max_pixels_per_frame, max_pixels // frames), int(min_pixels * 1.05)) * frames
        if min(size) < side:
            scale = max(side / size[0], side / size[1])
            size = int(size[0] * scale), int(size[1] * scale)
        return math.ceil(frames / pair) * _squares(size, side, min_pixels, max_pixels, frames, whole_pairs)

    def shrink_vision(self, values: dict[str, Any], layers: int) -> None:
        super().shrink_vision(values, layers)
        vision = values["vision_config"]
        deepstack_layers = vision.get("deepstack_visual_indexes")
        if deepstack_layers is not None:
            vision["deepstack_visual_indexes"] = list(range(min(vision["depth"], layers, len(deepstack_layers))))


def area(part: Mapping[str, Any]) -> tuple[int, int]:
    """Return the smallest and the largest area of an image in pixels, from the settings of an image or video processor.

    Checkpoints use one of two key names for each limit.
    """
    size = part.get("size") or {}
    return part.get("min_pixels") or size["shortest_edge"], part.get("max_pixels") or size["longest_edge"]


def _side(part: Mapping[str, Any]) -> int:
    """Return the side in pixels of the square of an image that becomes one token."""
    return part["patch_size"] * part["merge_size"]


def _squares(size: Size, side: int, low: int, high: int, frames: int = 1, whole_pairs: int = 1) -> int:
    """Count the squares of one scaled image or frame; each becomes a visual token.

    Sides are rounded to whole squares, then scaled until the area is within the limits.

    As in transformers' video processor, the limits are compared with the rounded area times `whole_pairs`, but the scale is
    computed from the unrounded area times `frames`.

    Args:
        size: width and height in pixels.
        side: side of a square in pixels.
        low, high: smallest and largest area in pixels.
    """
    width, height = size
    if max(size) > 200 * min(size):
        raise UnsupportedError(
            f"the image has {width}x{height} pixels; allowed for Qwen-VL: no side more than 200 times the other; crop "
            "or pad the image"
        )
    squares = [round(length / side) for length in size]
    pixels = whole_pairs * math.prod(squares) * side**2
    if pixels > high:
        shrink_factor = math.sqrt(frames * width * height / high)
        squares = [max(1, math.floor(length / shrink_factor / side)) for length in size]
    elif pixels < low:
        growth_factor = math.sqrt(low / (frames * width * height))
        squares = [math.ceil(length * growth_factor / side) for length in size]
    return math.prod(squares)


SHARED: dict[str, Any] = {
    "image_id_key": "image_token_id",
    "video_id_key": "video_token_id",
    "closing_id_key": "vision_end_token_id",
    "image_processor": "Qwen2VLImageProcessor",
    "pixel_limits": True,
    "equal_videos": False,
    "streams": True,
    "smaller_by": SIDES,
}
FAMILIES = (
    QwenVL(
        "qwen2_vl",
        "Qwen2-VL",
        (TextModel("qwen2_vl_text", qkv_bias=True, window_switch="use_sliding_window"),),
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLProcessor",
        video_processor="Qwen2VLVideoProcessor",
        **SHARED,
    ),
    QwenVL(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        (TextModel("qwen2_5_vl_text", qkv_bias=True, window_switch="use_sliding_window"),),
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLProcessor",
        video_processor="Qwen2VLVideoProcessor",
        **SHARED,
    ),
    Qwen3VL(
        "qwen3_vl",
        "Qwen3-VL",
        (TextModel("qwen3_vl_text", qk_norm=True, head_dim_follows=False),),
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLProcessor",
        video_processor="Qwen3VLVideoProcessor",
        whole_video_limit=True,
        repeats_last_frame=True,
        **SHARED,
    ),
)

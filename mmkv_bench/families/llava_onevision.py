"""LLaVA-OneVision and LLaVA-Video: a SigLIP tower of 384x384 pixels.

LLaVA-OneVision   arXiv 2408.03326 section 3.3: a single image as LLaVA-NeXT, 729 tokens a tile, interpolated to fewer
                  beyond 9 tiles' worth of tokens (384 is not a multiple of the patch of 14: the last 6 pixels of a tile are
                  in no patch); several images each padded to a square, 729 tokens and a newline; frames pooled to 196
                  tokens, with one newline after the video
LLaVA-Video       the released code: images as LLaVA-OneVision; frames pooled to 14x14, or averaged to 13x13 as
                  arXiv 2410.02713 says, with a newline token per row (mm_newline_position=grid)
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from mmkv_bench.families.base import QWEN2, SIDES, Box, Family, ImagePrompt, PixelLimits, Settings, Size
from mmkv_bench.families.tiles import (
    anyres,
    anyres_boxes,
    edge_of,
    grid,
    parts,
    patches,
    pooled_side,
    video_token_count,
)


class LlavaOneVision(Family):
    """Rules of LLaVA-OneVision."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        image_settings, processor = settings["image"], settings["processor"]
        per_tile = processor["num_image_tokens"]
        if images > 1:
            return per_tile + 1
        edge, max_tiles = edge_of(image_settings), _most_tiles(processor["vision_aspect_ratio"])
        return (
            per_tile
            + anyres(image_settings["image_grid_pinpoints"], edge, math.isqrt(per_tile), size, max_tiles).tokens
        )

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        side = math.isqrt(settings["processor"]["num_image_tokens"])
        return frames * pooled_side(side, "bilinear") ** 2 + 1

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        edge, patch = prompt.tower_edge(), prompt.config.vision_config.patch_size
        if len(prompt.sizes) == 1:
            max_tiles = _most_tiles(prompt.config.vision_aspect_ratio)
            tiling = anyres(prompt.config.image_grid_pinpoints, edge, edge // patch, prompt.sizes[0], max_tiles)
            return anyres_boxes(0, prompt.sizes[0], tiling, edge, patch)
        squares, boxes = patches(edge, patch), []
        for image, size in enumerate(prompt.sizes):
            scale = Fraction(edge, max(size))
            columns, rows = (parts(squares, (max(size) - side) // 2 * scale, side * scale) for side in size)
            boxes += [*grid(image, rows, columns), None]
        return boxes


class LlavaVideo(LlavaOneVision):
    """Rules of LLaVA-Video that differ; its classes are in `classes/llava_video.py`."""

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        processor_settings = settings["processor"]
        return video_token_count(
            frames,
            math.isqrt(processor_settings["num_image_tokens"]),
            processor_settings.get("video_pooling", "bilinear"),
        )

    def register_classes(self) -> None:
        from mmkv_bench.families.classes.llava_video import register

        register()

    def processor_class(self) -> Any:
        from mmkv_bench.families.classes.llava_video import LlavaVideoProcessor

        return LlavaVideoProcessor


def _most_tiles(aspect: str) -> int:
    """Return the largest number of tiles, which is the number at the end of a setting such as `anyres_max_9`."""
    return int(aspect.removeprefix("anyres_max_"))


_SHARED: dict[str, Any] = {
    "text_models": (QWEN2,),
    "image_processor": "LlavaOnevisionImageProcessor",
    "video_processor": "LlavaOnevisionVideoProcessor",
    "image_id_key": "image_token_id",
    "video_id_key": "video_token_id",
    "smaller_by": SIDES,
}
FAMILIES = (
    LlavaOneVision(
        "llava_onevision",
        "LLaVA-OneVision",
        model_class="LlavaOnevisionForConditionalGeneration",
        processor="LlavaOnevisionProcessor",
        **_SHARED,
    ),
    LlavaVideo(
        "llava_video",
        "LLaVA-Video",
        model_class="LlavaVideoForConditionalGeneration",
        processor="LlavaVideoProcessor",
        classes_version=1,
        **_SHARED,
    ),
)

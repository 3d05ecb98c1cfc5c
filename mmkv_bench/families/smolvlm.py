"""SmolVLM, arXiv 2504.05299, and Idefics3, arXiv 2408.12637, section 3.1: an image in tiles of the tower's square.

An image is scaled to a longest edge, small images up, and both sides are stretched to whole tiles. If there are several
tiles, the whole image follows, squashed into one more tile. A pixel shuffle makes one token of scale_factor x
scale_factor patches: 64 per tile of 512x512 (patches of 16, 4x4 a token), 81 per tile of 384x384 (patches of 14, 3x3;
the last 6 pixels of a tile are in no patch). A frame of a video is one tile with image tokens, so there is no video
token. Of the closing token only the text is known, not the id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import (
    LLAMA,
    OWN_FILES,
    TILES,
    Box,
    Family,
    ImagePrompt,
    PixelLimits,
    Settings,
    Size,
)
from mmkv_bench.families.tiles import parts, patches, tile_after_tile

if TYPE_CHECKING:
    from PIL.Image import Image


class SmolVLM(Family):
    """Rules of SmolVLM, SmolVLM2 and Idefics3."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        image_settings, tiles = settings["image"], 1
        if image_settings.get("do_image_splitting", True):
            tiles = math.prod(tile_grid(size, _edge(image_settings["size"]), _edge(image_settings["max_image_size"])))
        return settings["processor"]["image_seq_len"] * (tiles + (tiles > 1))

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        return settings["processor"]["image_seq_len"] * frames

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        image_processor, vision = prompt.processor.image_processor, prompt.config.vision_config
        tile, token = _edge(image_processor.max_image_size), vision.patch_size * prompt.config.scale_factor
        if tile != vision.image_size or not (image_processor.do_resize and image_processor.do_image_splitting):
            raise UnsupportedError(
                f"the image processor makes tiles of {tile} pixels (do_resize={image_processor.do_resize}, "
                f"do_image_splitting={image_processor.do_image_splitting}), but the vision tower takes {vision.image_size}, "
                f"so visual tokens cannot be located; restore the {OWN_FILES}"
            )
        boxes: list[Box | None] = []
        for image, size in enumerate(prompt.sizes):
            columns, rows = tile_grid(size, _edge(image_processor.size), tile)
            boxes += tile_after_tile(
                image, rows, columns, lambda count: parts(patches(tile, token, count), 0, count * tile)
            )
        return boxes

    def smaller_images(
        self, images: Sequence[Image], processor: Any, share: float
    ) -> tuple[list[Image], dict[str, Any]]:
        """Return two values: the images, unchanged, and a smaller longest edge as argument of the image processor.

        The longest edge is a whole number of tiles, at least one.
        """
        image_processor = processor.image_processor
        tile = _edge(image_processor.max_image_size)
        return list(images), {
            "size": {"longest_edge": tile * max(1, round(share * _edge(image_processor.size) / tile))}
        }


def tile_grid(size: Size, longest: int, tile: int) -> tuple[int, int]:
    """Return (columns, rows) of the tiles of an image whose longer side is scaled to `longest` pixels.

    size: width and height of the image. tile: side of a tile in pixels. The floating-point arithmetic is the processor's.
    """
    width, height = (max(side + side % 2, 2) for side in _scaled(size, longest))
    padded_side = math.ceil(max(width, height) / tile) * tile
    columns, rows = (math.ceil(side / tile) for side in _scaled((width, height), padded_side))
    return columns, rows


def _scaled(size: Size, longest: int) -> Size:
    """Return the sides of an image scaled so that the longer one has `longest` pixels; the other one is rounded down."""
    aspect = size[0] / size[1]
    return (longest, int(longest / aspect)) if aspect >= 1 else (int(longest * aspect), longest)


def _edge(size: Mapping[str, int]) -> int:
    return size["longest_edge"]


_SHARED: dict[str, Any] = {
    "image_id_key": "image_token_id",
    "closing_marker": "<fake_token_around_image>",
    "smaller_by": TILES,
    "streams": True,
}
FAMILIES = (
    SmolVLM(
        "idefics3",
        "SmolVLM",
        (LLAMA,),
        "Idefics3ForConditionalGeneration",
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        **_SHARED,
    ),
    SmolVLM(
        "smolvlm",
        "SmolVLM2",
        (LLAMA,),
        "SmolVLMForConditionalGeneration",
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        "SmolVLMVideoProcessor",
        **_SHARED,
    ),
)

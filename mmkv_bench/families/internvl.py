"""InternVL, arXiv 2404.16821 section 3.2: an image is squashed into a grid of tiles of 448x448, tile after tile.

The grid is the one with the nearest aspect ratio. If there is more than one tile, the whole image follows as a further
tile. 2x2 patches make a token, 256 a tile; a frame is one tile. The classes of transformers take a video as one
<img>...</img> block per frame, so there is no video token. Of the closing token only the text is known, not the id.
"""

from __future__ import annotations

import math

from mmkv_bench.families.base import LLAMA, QWEN2, QWEN3, TILES, Box, Family, ImagePrompt, PixelLimits, Settings, Size
from mmkv_bench.families.tiles import even, tile_after_tile


class InternVL(Family):
    """Rules of InternVL 2.5 and later."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        image_settings = settings["image"]
        tile = image_settings["size"]["height"] * image_settings["size"]["width"]
        min_tiles, max_tiles = image_settings.get("min_patches", 1), image_settings.get("max_patches", 12)
        tiles = (
            math.prod(tile_grid(size, tile, min_tiles, max_tiles)) if image_settings.get("crop_to_patches", True) else 1
        )
        return settings["processor"]["image_seq_length"] * (tiles + (tiles > 1))

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        return settings["processor"]["image_seq_length"] * frames

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        image_processor, edge = prompt.processor.image_processor, prompt.tower_edge()
        side = math.isqrt(prompt.processor.image_seq_length)
        boxes: list[Box | None] = []
        for image, size in enumerate(prompt.sizes):
            columns, rows = tile_grid(size, edge * edge, image_processor.min_patches, image_processor.max_patches)
            boxes += tile_after_tile(image, rows, columns, lambda tiles: even(tiles * side))
        return boxes


def tile_grid(size: Size, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return (columns, rows) of the grid of tiles whose aspect ratio is nearest to the image's.

    Among equally near grids, the largest is taken that the image fills by more than half.

    Args:
        size: width and height of the image in pixels.
        tile: number of pixels of a tile (its area).
        least, most: smallest and largest number of tiles.
    """
    width, height = size
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    best, best_distance = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < best_distance or (distance == best_distance and width * height > 0.5 * tile * columns * rows):
            best, best_distance = (columns, rows), distance
    return best


FAMILIES = (
    InternVL(
        "internvl",
        "InternVL",
        (QWEN2, QWEN3, LLAMA),
        "InternVLForConditionalGeneration",
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        "InternVLVideoProcessor",
        image_id_key="image_token_id",
        closing_marker="</img>",
        smaller_by=TILES,
    ),
)

"""How a prompt's pictures are made smaller, so that the model's own processor makes fewer tokens of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmkv_bench.models.families import Family

BY_SIDES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next", "llava_next_video", "llava_onevision", "llava_video"}
"""Model types of which a smaller picture has fewer tokens: by its area, or by the tiles that it needs."""
BY_TILES = {"internvl"}
"""Model types that cut by the picture's shape, whatever its size: fewer tiles are allowed."""


def check_smaller(family: Family) -> None:
    """Refuse families whose pictures have as many tokens at every size. Raises UnsupportedError."""
    if family.model_type not in BY_SIDES | BY_TILES:
        raise UnsupportedError(
            f"method pixels shows smaller pictures, and {family.name} makes as many tokens of a picture of any size; allowed: "
            f"{', '.join(sorted(BY_SIDES | BY_TILES))}, whose tokens follow the resolution; leave pixels out"
        )


def smaller(images: Sequence[Image], processor: Any, share: float) -> tuple[list[Image], dict[str, Any]]:
    """(images, keyword arguments of the processor's images) with sides, or tiles, of at most this share, 0 < share <= 1.

    Sides are rounded to whole pixels, one at least; the picture is scaled by Pillow's bicubic filter.
    """
    part: Any = getattr(processor, "image_processor", None)
    if hasattr(part, "max_patches"):
        most = max(1, round(share * part.max_patches))
        return list(images), {"max_patches": most, "min_patches": min(part.min_patches, most)}
    from PIL.Image import Resampling

    def scaled(image: Image) -> Image:
        width, height = (max(1, round(side * share)) for side in image.size)
        return image.convert("RGB").resize((width, height), Resampling.BICUBIC)

    return [scaled(image) for image in images], {}

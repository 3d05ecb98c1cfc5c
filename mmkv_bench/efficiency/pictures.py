"""Made pictures and videos: rectangles in many colours, drawn by a seed, so that neither tower nor method sees a blank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.efficiency.sizing import Size

if TYPE_CHECKING:
    import numpy as np

_SHAPES = 80
_STEP = 4  # pixels that a scene moves between two frames


def picture(size: Size, draw: random.Random) -> Any:
    """A PIL image, RGB."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, _colour(draw))
    canvas = ImageDraw.Draw(image)
    for _ in range(_SHAPES):
        left, top = draw.randrange(size.width), draw.randrange(size.height)
        right, bottom = left + draw.randint(1, size.width // 4 + 1), top + draw.randint(1, size.height // 4 + 1)
        canvas.rectangle((left, top, right, bottom), fill=_colour(draw), outline=_colour(draw))
    return image


def pictures(sizes: Sequence[Size], draw: random.Random) -> list[Any]:
    """One of each size, all different."""
    return [picture(size, draw) for size in sizes]


def video(frames: int, size: Size, draw: random.Random) -> np.ndarray:
    """uint8 `[frames, height, width, 3]`: a scene that passes by."""
    import numpy as np

    scene = np.asarray(picture(Size(size.width + _STEP * frames, size.height), draw))
    return np.stack([scene[:, _STEP * place : _STEP * place + size.width] for place in range(frames)])


def _colour(draw: random.Random) -> tuple[int, int, int]:
    return draw.randrange(256), draw.randrange(256), draw.randrange(256)

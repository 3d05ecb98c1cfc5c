"""Sizes of pictures, and frames of a video, whose visual tokens fill a prompt: by the families' own rules, without a processor.

As many visual tokens as fit: one picture near to a square where the family scales by area (Qwen-VL), several of one size where
one may not have so many; tiles, larger pictures first, where it cuts into tiles. A video has `model.frames` frames (32 where
nothing is said) of the largest size that fits, fewer where even the smallest size is too much, and more where frames cannot be
large enough and nobody said how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmkv_bench.families.base import NO_LIMITS, PixelLimits
from mmkv_bench.families.registry import family, image_tokens, video_tokens
from mmkv_bench.models.video import DEFAULT_FRAMES

_GRID = 36
"""Tiles of the largest picture that is tried."""
_READ = (
    *("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "num_image_tokens"),
    *("vision_aspect_ratio", "image_seq_length", "video_pooling"),
)
"""Settings of a processor that are its own, not its image or video processor's."""


class Size(NamedTuple):
    """Pixels of a picture, or of each frame of a video."""

    width: int
    height: int


@dataclass(frozen=True)
class Rules:
    """A family's rules with the settings of one processor.

    Attributes:
        settings: as `families.registry` reads them; limits: of the run; frames: of a video, where the run says it.
    """

    model_type: str
    settings: Mapping[str, Any]
    limits: PixelLimits = NO_LIMITS
    frames: int | None = None

    @classmethod
    def of(cls, model_type: str, processor: Any, limits: PixelLimits = NO_LIMITS, frames: int | None = None) -> Rules:
        """Those of a processor of transformers, whose own limits are set already; `limits`: what is set at each call."""
        parts = {
            kind: dict(getattr(processor, f"{kind}_processor").to_dict())
            for kind in ("image", "video")
            if getattr(processor, f"{kind}_processor", None) is not None
        }
        parts["processor"] = {name: getattr(processor, name) for name in _READ if hasattr(processor, name)}
        return cls(model_type, parts, limits, frames)

    @property
    def _by_area(self) -> bool:
        return family(self.model_type).pixel_limits

    def pictures(self, room: int, beside: int) -> list[Size]:
        """Sizes of the pictures of one prompt, none where not even the smallest fits.

        Args:
            room: tokens for all of them; beside: of these, what each takes beside its visual ones (markers).
        """
        alone = self._greedy(room, beside, 1)
        several = self._greedy(room, beside, 2)
        counts = [sum(self._picture(size, len(sizes)) for size in sizes) for sizes in (alone, several)]
        return alone if counts[0] >= counts[1] else several

    def video(self, room: int) -> tuple[int, Size] | None:
        """Frames of a video and their size, None where not even one small frame fits; room: tokens for its visual ones."""
        if room < 1:
            return None
        large = self._shaped(room)

        def least(frames: int) -> int:
            return self._video(frames, self._shaped(1))

        frames = self.frames or DEFAULT_FRAMES
        if least(frames) > room:
            frames = _most(lambda count: least(count) <= room, frames)
        elif self.frames is None and self._video(frames, large) <= room:
            while self._video(frames, large) < self._video(2 * frames, large) <= room:
                frames *= 2
            if self._video(frames, large) < self._video(2 * frames, large):  # or the family's most is reached
                frames = _most(lambda count: self._video(count, large) <= room, 2 * frames)
        if not frames or least(frames) > room:
            return None
        return frames, self._largest(lambda size: self._video(frames, size), room) or self._shaped(1)

    # ------------------------------------------------------------------ pictures
    def _greedy(self, room: int, beside: int, images: int) -> list[Size]:
        """Of one picture (images=1), or of as many as fit: of equal area, or larger ones first where there are tiles."""
        if room <= beside:
            return []
        if self._by_area:
            most = self._picture(self._shaped(room), images)
            count = 1 if images == 1 else max(1, math.ceil(room / (most + beside)))
            each = room // count - beside
            size = self._largest(lambda one: self._picture(one, images), each)
            return [size] * count if size else []
        menu = sorted(((count, size) for size, count in self._menu(images).items()), reverse=True)
        sizes: list[Size] = []
        for count, size in menu:
            fitting = room // (count + beside)
            taken = min(fitting, 1 - len(sizes)) if images == 1 else fitting
            sizes += [size] * taken
            room -= taken * (count + beside)
        return sizes

    def _menu(self, images: int) -> dict[Size, int]:
        """Sizes in whole tiles with their visual tokens, the smallest of each number of tokens."""
        edge = self._tile()
        counts: dict[int, Size] = {}
        shapes = [(c, r) for c in range(1, _GRID + 1) for r in range(1, _GRID + 1) if c * r <= _GRID and max(c, r) <= 6]
        for columns, rows in sorted(shapes, key=lambda shape: (shape[0] * shape[1], abs(shape[0] - shape[1]))):
            size = Size(columns * edge, rows * edge)
            counts.setdefault(self._picture(size, images), size)
        return {size: count for count, size in counts.items()}

    def _picture(self, size: Size, images: int) -> int:
        return image_tokens(self.model_type, self.settings, *size, images, self.limits)

    # ------------------------------------------------------------------ videos
    def _video(self, frames: int, size: Size) -> int:
        return video_tokens(self.model_type, self.settings, frames, *size, self.limits)

    def _shaped(self, units: int) -> Size:
        """A size near to a square of at most so many units: of an area's squares, else of one tile."""
        if not self._by_area:
            return Size(self._tile(), self._tile())
        part = self.settings["image"]
        unit = part["patch_size"] * part["merge_size"]
        side = math.isqrt(units)
        rows = max(range(max(1, 2 * side // 3), side + 1), key=lambda rows: (units // rows * rows, rows))
        return Size(units // rows * unit, rows * unit)

    def _largest(self, tokens: Callable[[Size], int], room: int) -> Size | None:
        """The smallest size that has as many tokens as fit into the room; None where none fits."""
        area = _most(lambda units: tokens(self._shaped(units)) <= room, room)
        if not area:
            return None
        reached = tokens(self._shaped(area))
        return self._shaped(_most(lambda units: tokens(self._shaped(units)) < reached, area - 1) + 1)

    def _tile(self) -> int:
        part = self.settings["image"]
        size = part.get("crop_size") or part["size"]
        return int(size["height"] if size.get("height") else size["shortest_edge"])


def _most(fits: Callable[[int], bool], high: int) -> int:
    """The largest of 1 to `high` for which a condition that holds up to some number holds; 0 where it never does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

"""Sizes of pictures, or frames of a video, whose visual tokens fill a prompt, by the families' rules.

As many visual tokens as possible are used. Families that scale by area (Qwen-VL) get one nearly square picture, or
several of equal size if one may not have so many tokens. Families with tiles get whole tiles, larger pictures first. A
video has `model.frames` frames (default 32) of the largest size that fits. It has fewer frames if even the smallest
frames do not fit, and more if the largest frames leave room and the run does not set the number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mmkv_bench.families.base import NO_LIMITS, PixelLimits
from mmkv_bench.families.registry import family, image_tokens, video_tokens
from mmkv_bench.models.video import DEFAULT_FRAMES

_MAX_TILES = 36
"""Maximum number of tiles of a picture."""
_READ_SETTINGS = (
    *("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "num_image_tokens"),
    *("vision_aspect_ratio", "image_seq_length", "video_pooling"),
)
"""Settings of the processor itself, not of its image or video processor."""


class Size(NamedTuple):
    """Width and height of a picture, or of each frame of a video, in pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class Rules:
    """A model family's rules for the number of visual tokens, with the settings of one processor.

    Attributes:
        settings: settings of the processor, in the form that `families.registry` reads.
        limits: the run's limits of a picture's area.
        frames: number of a video's frames; None if the run does not set it.
    """

    model_type: str
    settings: Mapping[str, Any]
    limits: PixelLimits = NO_LIMITS
    frames: int | None = None

    @classmethod
    def of(cls, model_type: str, processor: Any, limits: PixelLimits = NO_LIMITS, frames: int | None = None) -> Rules:
        """Return the rules of a transformers processor with its own size limits. limits: further limits of the run."""
        settings_by_kind = {
            kind: dict(getattr(processor, f"{kind}_processor").to_dict())
            for kind in ("image", "video")
            if getattr(processor, f"{kind}_processor", None) is not None
        }
        settings_by_kind["processor"] = {
            name: getattr(processor, name) for name in _READ_SETTINGS if hasattr(processor, name)
        }
        return cls(model_type, settings_by_kind, limits, frames)

    def pictures(self, room: int, beside: int) -> list[Size]:
        """Return the sizes of pictures that fill a prompt with visual tokens; none if no picture fits.

        Args:
            room: tokens for all pictures.
            beside: tokens per picture besides its visual tokens (markers), included in `room`.
        """
        one_picture = self._greedy(room, beside, 1)
        several_pictures = self._greedy(room, beside, 2)
        token_counts = [
            sum(self.picture_tokens(size, len(sizes)) for size in sizes) for sizes in (one_picture, several_pictures)
        ]
        return one_picture if token_counts[0] >= token_counts[1] else several_pictures

    def video(self, room: int) -> tuple[int, Size] | None:
        """Return number of frames and frame size of a video that fills `room` tokens; None if not even one small frame
        fits."""
        if room < 1:
            return None
        smallest_video_tokens, largest_video_tokens = (
            partial(self.video_tokens, size=self._square_size(units)) for units in (1, room)
        )
        frames = self.frames or DEFAULT_FRAMES
        if smallest_video_tokens(frames) > room:
            frames = _largest_true(lambda count: smallest_video_tokens(count) <= room, frames)
        elif self.frames is None and largest_video_tokens(frames) <= room:
            while largest_video_tokens(frames) < largest_video_tokens(2 * frames) <= room:
                frames *= 2
            if largest_video_tokens(frames) < largest_video_tokens(2 * frames):  # else the family's maximum is reached
                frames = _largest_true(lambda count: largest_video_tokens(count) <= room, 2 * frames)
        if not frames or smallest_video_tokens(frames) > room:
            return None
        return frames, self._largest_size(lambda size: self.video_tokens(frames, size), room) or self._square_size(1)

    # ------------------------------------------------------------------ pictures
    def _greedy(self, room: int, beside: int, images: int) -> list[Size]:
        """Return the sizes of pictures that fill `room` tokens: one picture if images=1, else as many as fit.

        beside: tokens per picture besides its visual tokens.
        """
        if room <= beside:
            return []
        if family(self.model_type).pixel_limits:
            most_tokens = self.picture_tokens(self._square_size(room), images)
            number_of_pictures = 1 if images == 1 else max(1, math.ceil(room / (most_tokens + beside)))
            tokens_per_picture = room // number_of_pictures - beside
            fitting_size = self._largest_size(lambda one: self.picture_tokens(one, images), tokens_per_picture)
            return [fitting_size] * number_of_pictures if fitting_size else []
        picture_sizes: list[Size] = []
        for number_of_pictures, fitting_size in sorted(self._tile_sizes(images).items(), reverse=True):
            fitting = room // (number_of_pictures + beside)
            pictures_taken = min(fitting, 1 - len(picture_sizes)) if images == 1 else fitting
            picture_sizes += [fitting_size] * pictures_taken
            room -= pictures_taken * (number_of_pictures + beside)
        return picture_sizes

    def _tile_sizes(self, images: int) -> dict[int, Size]:
        """Map each possible number of visual tokens to the smallest picture of whole tiles that has this number.

        images: number of pictures in the prompt.
        """
        tile_pixels = self._tile()
        size_by_tokens: dict[int, Size] = {}
        tile_grids = [
            (c, r)
            for c in range(1, _MAX_TILES + 1)
            for r in range(1, _MAX_TILES + 1)
            if c * r <= _MAX_TILES and max(c, r) <= 6
        ]
        for columns, rows in sorted(tile_grids, key=lambda shape: (shape[0] * shape[1], abs(shape[0] - shape[1]))):
            grid_size = Size(columns * tile_pixels, rows * tile_pixels)
            size_by_tokens.setdefault(self.picture_tokens(grid_size, images), grid_size)
        return size_by_tokens

    def picture_tokens(self, size: Size, images: int) -> int:
        """Return the number of visual tokens of a picture of this size, in a prompt with `images` pictures."""
        return image_tokens(self.model_type, self.settings, *size, images, self.limits)

    # ------------------------------------------------------------------ videos
    def video_tokens(self, frames: int, size: Size) -> int:
        """Return the number of visual tokens of a video with `frames` frames of this size."""
        return video_tokens(self.model_type, self.settings, frames, *size, self.limits)

    def _square_size(self, units: int) -> Size:
        """Return a nearly square size of at most `units` merged patches; for families with tiles, one tile."""
        if not family(self.model_type).pixel_limits:
            return Size(self._tile(), self._tile())
        image_settings = self.settings["image"]
        patch_pixels = image_settings["patch_size"] * image_settings["merge_size"]
        units_per_side = math.isqrt(units)
        rows = max(
            range(max(1, 2 * units_per_side // 3), units_per_side + 1), key=lambda rows: (units // rows * rows, rows)
        )
        return Size(units // rows * patch_pixels, rows * patch_pixels)

    def _largest_size(self, tokens: Callable[[Size], int], room: int) -> Size | None:
        """Return the size with the most tokens that fit into `room`; of equal ones the smallest; None if none fits.

        tokens: function from a size to its number of tokens.
        """
        most_units = _largest_true(lambda units: tokens(self._square_size(units)) <= room, room)
        if not most_units:
            return None
        most_tokens = tokens(self._square_size(most_units))
        return self._square_size(
            _largest_true(lambda units: tokens(self._square_size(units)) < most_tokens, most_units - 1) + 1
        )

    def _tile(self) -> int:
        image_settings = self.settings["image"]
        tile_size = image_settings.get("crop_size") or image_settings["size"]
        return int(tile_size["height"] if tile_size.get("height") else tile_size["shortest_edge"])


def _largest_true(fits: Callable[[int], bool], high: int) -> int:
    """Return the largest number from 1 to `high` for which `fits` is true, by bisection; 0 if there is none.

    `fits` must be true up to some number and false above it.
    """
    return bisect_left(range(1, high + 1), True, key=lambda number: not fits(number))

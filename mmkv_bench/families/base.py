"""Pixel limits of a run, set on a processor of transformers whose family has them."""

from __future__ import annotations

from typing import Any

from mmkv_bench.errors import ConfigError

_LOW, _HIGH = "shortest_edge", "longest_edge"
"""What the processors of Qwen-VL call their limits; both are areas in pixels, not edges."""


def apply_limits(
    processor: Any,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    video_max_pixels: int | None = None,
    frames: int | None = None,
) -> None:
    """Change a processor's limits where they are asked for.

    Args:
        min_pixels, max_pixels: area that an image is scaled up or down to, before it is cut into patches.
        video_max_pixels: the same of one frame; frames: of a video, for processors that limit a video as a whole
            (Qwen3-VL).

    Raises:
        ConfigError: a processor without such limits (LLaVA and InternVL scale to fixed tiles), or limits that exclude
            each other.
    """
    if min_pixels is not None or max_pixels is not None:
        key = "model.min_pixels" if max_pixels is None else "model.max_pixels"
        _limit(getattr(processor, "image_processor", None), key, min_pixels, max_pixels)
    if video_max_pixels is not None:
        video = getattr(processor, "video_processor", None)
        whole = type(video).__name__.startswith("Qwen3VL")
        _limit(video, "model.video_max_pixels", None, video_max_pixels * (frames or 1 if whole else 1))


def _limit(part: Any, key: str, low: int | None, high: int | None) -> None:
    size = dict(getattr(part, "size", None) or {}) if part is not None else {}
    if not _by_area(part, size):
        raise ConfigError(
            f"{key} has no effect on {type(part).__name__ if part is not None else 'a text model'}, which scales to fixed "
            "sizes; leave it out (only Qwen-VL models have pixel limits)"
        )
    size |= {name: value for name, value in ((_LOW, low), (_HIGH, high)) if value is not None}
    if size[_LOW] > size[_HIGH]:
        raise ConfigError(
            f"{key}: at least {size[_LOW]} and at most {size[_HIGH]} pixels exclude each other; give both "
            "model.min_pixels and model.max_pixels"
        )
    part.size = type(part.size)(**size)


def _by_area(part: Any, size: dict[str, Any]) -> bool:
    return type(part).__name__.startswith("Qwen") and size.get(_LOW) is not None and size.get(_HIGH) is not None

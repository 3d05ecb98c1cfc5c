"""Process the images and videos of a document once for all questions about the document."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


class SharedMedia:
    """Processor for prompts with the same media and different texts.

    Attributes:
        processor: copy of a model's processor that reuses the previous result for the same media and settings.
    """

    def __init__(self, processor: Any):
        self.processor = processor
        processor_names = [
            name for name in ("image_processor", "video_processor") if getattr(processor, name, None) is not None
        ]
        if processor_names:
            self.processor = copy.copy(processor)
            for name in processor_names:
                setattr(self.processor, name, _Repeating(getattr(processor, name)))
        self._read: dict[str, Any] | None = None

    def media(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the processor's arguments for the media: the result of `read`, which is called once."""
        if self._read is None:
            self._read = read()
        return self._read


class _Repeating:
    """An image or video processor that caches its last call."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._last: tuple[list[Any], str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *media: Any, **settings: Any) -> Any:
        named = [settings[name] for name in ("images", "videos") if name in settings]
        plain = repr({name: value for name, value in settings.items() if name not in ("images", "videos")})
        media_leaves, last_call = _leaves([*media, *named]), self._last
        if (
            last_call is None
            or last_call[1] != plain
            or [id(one) for one in last_call[0]] != [id(one) for one in media_leaves]
        ):
            last_call = self._last = media_leaves, plain, self._inner(*media, **settings)
        return copy.copy(last_call[2])  # processors take entries out of what they get


def _leaves(media: Any) -> list[Any]:
    """Return the images and frames of nested lists in one list, in order."""
    return [leaf for one in media for leaf in _leaves(one)] if isinstance(media, list | tuple) else [media]

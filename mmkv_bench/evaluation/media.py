"""Which columns of a dataset hold media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets


def media_columns(docs: datasets.Dataset) -> list[str]:
    """Names of the columns that hold pictures, sound or videos, or lists of them."""
    from datasets import Audio, Image, Video

    return [
        name
        for name, feature in docs.features.items()
        if isinstance(getattr(feature, "feature", feature), Image | Audio | Video)
    ]


def holds_media(feature: Any) -> bool:
    """Whether a feature has pictures, sound or videos anywhere in it."""
    from datasets import Audio, Image, Video

    if isinstance(feature, Image | Audio | Video):
        return True
    if isinstance(feature, Mapping):
        return any(map(holds_media, feature.values()))
    if isinstance(feature, list):
        return any(map(holds_media, feature))
    return hasattr(feature, "feature") and holds_media(feature.feature)

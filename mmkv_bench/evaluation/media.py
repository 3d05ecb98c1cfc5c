"""Which columns of a dataset hold media."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

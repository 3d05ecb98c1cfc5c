"""Which split a rendering belongs to, and the random generator of a sample.

Every split draws from glyph renderings, colours, handwritten digits and page seeds that no other split uses. Renderings are
settings of the type setter, many of which draw the same pixels (`glyphs.seen_in_training`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SPLITS = ("train", "dev", "test", "test_typeface")


def digest(*parts: object) -> int:
    """A 128-bit integer from the sha256 of the parts' text (the same on every machine and Python version)."""
    text = "|".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def hashed_split(*parts: object) -> str:
    """'train' (80%), 'dev' (10%) or 'test' (10%) for one rendering, decided by its hash alone."""
    value = digest("split", *parts) % 100
    return "train" if value < 80 else "dev" if value < 90 else "test"


def rendering_split(split: str) -> str:
    """The split whose colours and scans `split` uses: test_typeface shares them with test."""
    return "test" if split == "test_typeface" else split


def generator(*parts: object) -> np.random.Generator:
    """A numpy generator seeded by its arguments alone; callers name the split in them, so splits share no seed."""
    import numpy as np

    return np.random.default_rng(digest("generator", *parts))

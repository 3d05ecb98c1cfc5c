"""Pages that the embedded model reads, with several questions each; a page is drawn when its prompt is made."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from mmkv_bench.datasets.tasks.questions.rows import COUNTS, QUESTIONS

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from mmkv_bench.tiny.layout import Document

GENERIC = "?"  # a question's mark without a key


def rows(split: str) -> list[dict]:
    """Return the rows of a split, `QUESTIONS` a page; each asks for the digits behind another key."""
    made: list[dict] = []
    for number in range(COUNTS[split]):
        document, keys, _ = _page(split, number)
        shared = {"document": f"{split}-{number:06d}", "questions": [f"{key}?" for key in keys], "generic": GENERIC}
        made += [
            shared | {"split": split, "number": number, "question_number": place, "answer": document.entries[key][0]}
            for place, key in enumerate(keys)
        ]
    return made


@lru_cache(maxsize=1)
def image(split: str, number: int) -> Image.Image:
    """Draw a page: RGB, 448 x 448 pixels. The last one is kept for its next question."""
    from PIL import Image

    from mmkv_bench.tiny.pages import draw_look, render

    document, _, rng = _page(split, number)
    return Image.fromarray(render(document.grids[0], split, draw_look(split, rng), False, rng))


def _page(split: str, number: int) -> tuple[Document, list[str], np.random.Generator]:
    """Return what stands on a page, the keys that are asked for, and the generator that draws it."""
    from mmkv_bench.tiny import splits
    from mmkv_bench.tiny.layout import make_document
    from mmkv_bench.tiny.pages import ENTRIES, SIZES

    rng = splits.generator("questions", split, number)
    side = SIZES["small"]
    document = make_document(rng, side, side, 1, ENTRIES["small"], float(rng.uniform(0.0, 0.6)), longest=QUESTIONS)
    keys = list(document.entries)
    return document, [keys[place] for place in rng.permutation(len(keys))[:QUESTIONS]], rng

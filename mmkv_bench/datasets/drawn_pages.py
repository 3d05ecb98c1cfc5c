"""Functions that draw samples of drawn datasets again, so that a report on stored answers can show their pictures.

The pattern of a sample's id selects the function. To add a dataset of drawn samples, add an entry to `DRAWERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class DrawnSample:
    """A sample drawn again for a report.

    Attributes:
        images: pictures of the prompt; empty if the drawn prompt differs from the answered one.
        question, answer: question and reference answer of the sample; None if the report has to take both from the stored prompt.
    """

    images: list[Image.Image]
    question: str | None = None
    answer: str | None = None


Drawer = Callable[["re.Match[str]", str, str, str], DrawnSample | None]
"""Function from a matched sample id and the other arguments of `drawn` to the sample, or None if it cannot be drawn."""


def drawn(sample_id: str, prompt_hash: str, question: str, reference: str) -> DrawnSample | None:
    """Draw the sample with this id again; return None if the id belongs to no drawn dataset.

    Args:
        sample_id: id of the sample in the rows.
        prompt_hash: hash of the answered prompt; "" if no prompt is stored.
        question, reference: question and reference answer of the answered prompt; "" if no prompt is stored.
    """
    for pattern, drawer in DRAWERS.items():
        if match := re.fullmatch(pattern, sample_id):
            return drawer(match, prompt_hash, question, reference)
    return None


def _page(page: re.Match[str], prompt_hash: str, question: str, reference: str) -> DrawnSample | None:
    """Draw a sample of the embedded model's pages. Return an empty `DrawnSample` if its prompt hash differs from
    `prompt_hash`, and None if there is no such sample."""
    from mmkv_bench.datasets.page_data import to_row
    from mmkv_bench.tiny.pages import make_sample

    try:
        sample = make_sample(page["task"], page["size"], page["split"], int(page["index"]))
    except ConfigError:
        return None
    if prompt_hash and to_row(sample)["prompt_hash"] != prompt_hash:
        return DrawnSample([])
    return DrawnSample(sample.images, sample.question, sample.answer)


def _reader_page(page: re.Match[str], prompt_hash: str, question: str, reference: str) -> DrawnSample | None:
    """Draw a sample of the reader model, from the split in which the sample has this question and reference answer."""
    from PIL import Image

    from mmkv_bench.reader.trials import pictures, trial

    task, number = page["task"], int(page["number"])
    for split in ("test", "dev"):
        sample_question, answer = trial(task, split, number).turns[-1]
        if sample_question in question and answer == reference:
            return DrawnSample([Image.fromarray(one) for one in pictures(task, split, number)])
    return None


DRAWERS: dict[str, Drawer] = {
    r"(?P<task>[a-z0-9_]+)-(?P<size>small|large)-(?P<split>test|dev|train|test_typeface)-(?P<index>\d{6})": _page,
    r"reader_(?P<task>value|row|second|change)-(?P<number>\d{6})": _reader_page,
}
"""Pattern of sample ids -> function that draws such a sample."""

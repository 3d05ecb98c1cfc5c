"""Samples of drawn datasets, drawn again for reports on stored rows, which have no pictures. The pattern of a sample's id selects
the drawing function.

To add a dataset of drawn samples, add an entry to `DRAWERS`.
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
    """A sample that was drawn again.

    Attributes:
        images: images of the sample's prompt; empty if the prompt is not the one that was answered.
        question, answer: the sample's question and answer; None: use the question and answer of the stored prompt.
    """

    images: list[Image.Image]
    question: str | None = None
    answer: str | None = None


Drawer = Callable[["re.Match[str]", str, str, str], DrawnSample | None]
"""Function from a matched sample id and the other arguments of `drawn` to the sample, or None if it cannot be drawn."""


def drawn(sample_id: str, prompt_hash: str, question: str, reference: str) -> DrawnSample | None:
    """Draw a sample again; return None if the sample id belongs to no drawn dataset.

    prompt_hash, question, reference: of the prompt that was answered; empty if no prompt is stored."""
    for pattern, drawer in DRAWERS.items():
        if match := re.fullmatch(pattern, sample_id):
            return drawer(match, prompt_hash, question, reference)
    return None


def _page(page: re.Match[str], prompt_hash: str, question: str, reference: str) -> DrawnSample | None:
    """Draw a page of the embedded model; without images if the prompt's hash differs from the answered one."""
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
    """Draw pages or frames of the reader model, from the split whose question and answer are the stored ones."""
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

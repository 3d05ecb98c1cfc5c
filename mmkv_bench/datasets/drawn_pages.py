"""Samples that are drawn, drawn again for whoever looks at their rows: each kind of them offers it by the form of its sample ids.

A further data set of drawn samples is one more entry of `DRAWERS`.
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
    """A sample as it is drawn now.

    Attributes:
        images: of its prompt; none where it is another one than was answered.
        question, answer: of the sample; None where those of the stored prompt hold.
    """

    images: list[Image.Image]
    question: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class AnsweredPrompt:
    """What is known of the prompt that was answered; question and reference are None where the rows hold no prompt."""

    prompt_hash: str
    question: str | None = None
    reference: str | None = None


Drawer = Callable[["re.Match[str]", AnsweredPrompt], DrawnSample | None]
"""Matched sample id and answered prompt -> the sample; None where nothing is drawn for them."""


def drawn(sample_id: str, answered: AnsweredPrompt) -> DrawnSample | None:
    """Draw a sample again; None for a sample that nothing here draws."""
    for pattern, drawer in DRAWERS.items():
        if match := re.fullmatch(pattern, sample_id):
            return drawer(match, answered)
    return None


def _page(page: re.Match[str], answered: AnsweredPrompt) -> DrawnSample | None:
    """Draw a page of the embedded model; the hash of its prompt says whether it is the one that was answered."""
    from mmkv_bench.datasets.page_data import to_row
    from mmkv_bench.tiny.pages import make_sample

    try:
        sample = make_sample(page["task"], page["size"], page["split"], int(page["index"]))
    except ConfigError:
        return None
    if answered.prompt_hash and to_row(sample)["prompt_hash"] != answered.prompt_hash:
        return DrawnSample([])
    return DrawnSample(sample.images, sample.question, sample.answer)


def _reader_page(page: re.Match[str], answered: AnsweredPrompt) -> DrawnSample | None:
    """Draw pages or frames of the reader, of the split that asks this question and has this answer."""
    from PIL import Image

    from mmkv_bench.reader.trials import pictures, trial

    task, number = page["task"], int(page["number"])
    for split in ("test", "dev"):
        asked, answer = trial(task, split, number).turns[-1]
        if asked in (answered.question or "") and answer == answered.reference:
            return DrawnSample([Image.fromarray(one) for one in pictures(task, split, number)])
    return None


DRAWERS: dict[str, Drawer] = {
    r"(?P<task>[a-z0-9_]+)-(?P<size>small|large)-(?P<split>test|dev|train|test_typeface)-(?P<index>\d{6})": _page,
    r"reader_(?P<task>value|row|second|change)-(?P<number>\d{6})": _reader_page,
}
"""Form of the sample ids -> what draws such a sample."""

"""Which option an answer names, when options are texts and answers may say more than the option."""

from __future__ import annotations

import re
from collections.abc import Sequence


def chosen(answer: str, options: Sequence[str]) -> str | None:
    """The one option whose text the answer holds, whatever its case, spacing and final full stop.

    An option that is part of another one which the answer holds too does not count there. None when no option is found, or
    several are.
    """
    text = _plain(answer)
    spans = {option: _spans(_plain(option), text) for option in options}
    found = [option for option in options if any(not _inside(span, option, spans) for span in spans[option])]
    return found[0] if len(found) == 1 else None


def released(answer: str, options: Sequence[str], correct: str) -> bool:
    """Whether the benchmark's own script counts the answer as right: it holds the correct option and none of the options
    that contain the correct one. An answer with all options is right where none contains another."""
    text = answer.lower()
    longer = [option for option in options if option != correct and correct in option]
    return correct.lower() in text and not any(option.lower() in text for option in longer)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".").casefold()


def _spans(option: str, text: str) -> list[tuple[int, int]]:
    """Where the option stands in the text as whole words, overlaps included."""
    if not option:
        return []
    pattern = re.compile(rf"(?<!\w)(?=({re.escape(option)})(?!\w))")
    return [(match.start(), match.start() + len(option)) for match in pattern.finditer(text)]


def _inside(span: tuple[int, int], option: str, spans: dict[str, list[tuple[int, int]]]) -> bool:
    """Whether a longer option covers the place."""
    start, end = span
    return any(
        first <= start and end <= last and last - first > end - start
        for other, places in spans.items()
        if other != option
        for first, last in places
    )

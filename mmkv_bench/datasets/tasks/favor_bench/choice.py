"""Find the option that an answer names; options are texts, and an answer may contain more than the option."""

from __future__ import annotations

import re
from collections.abc import Sequence


def chosen(answer: str, options: Sequence[str]) -> str | None:
    """Return the only option whose text occurs in the answer, ignoring case, spacing and a final full stop.

    An option inside a longer option that also occurs is not counted there. None if no option or several options occur.
    """
    text = _plain(answer)
    spans = {option: _spans(_plain(option), text) for option in options}
    found = [option for option in options if any(not _inside(span, option, spans) for span in spans[option])]
    return found[0] if len(found) == 1 else None


def released(answer: str, options: Sequence[str], correct: str) -> bool:
    """Tell whether the benchmark's own script counts the answer as right.

    The answer must contain the correct option and none of the options that contain the correct option. So an answer with all
    options is right if no option contains another.
    """
    text = answer.lower()
    longer = [option for option in options if option != correct and correct in option]
    return correct.lower() in text and not any(option.lower() in text for option in longer)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".").casefold()


def _spans(option: str, text: str) -> list[tuple[int, int]]:
    """Return the spans of the option's occurrences in the text as whole words, overlaps included."""
    if not option:
        return []
    pattern = re.compile(rf"(?<!\w)(?=({re.escape(option)})(?!\w))")
    return [(match.start(), match.start() + len(option)) for match in pattern.finditer(text)]


def _inside(span: tuple[int, int], option: str, spans: dict[str, list[tuple[int, int]]]) -> bool:
    """Tell whether a longer option covers the span."""
    start, end = span
    return any(
        first <= start and end <= last and last - first > end - start
        for other, places in spans.items()
        if other != option
        for first, last in places
    )

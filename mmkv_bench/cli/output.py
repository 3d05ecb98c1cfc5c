"""Output of verbs without control characters that a terminal would obey: names in rows may be anybody's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Control characters but tab and line break, among them those of colours, which can hide text, and what turns the direction of
# writing.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """A text whose control characters are written as escapes."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SanitizingStream:
    """A text stream that writes `harmless` texts; everything else is the stream's own."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(harmless(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def harmless_output() -> Iterator[None]:
    """Standard output as a `SanitizingStream` stream, while a verb works."""
    before = sys.stdout
    mine: Any = before if before is None or isinstance(before, SanitizingStream) else SanitizingStream(before)
    sys.stdout = mine
    try:
        yield
    finally:
        if sys.stdout is mine:
            sys.stdout = before


def clear_screen() -> None:
    """Clear the terminal, which `SanitizingStream` would not let a text do."""
    stream = sys.stdout.stream if isinstance(sys.stdout, SanitizingStream) else sys.stdout
    stream.write("\x1b[H\x1b[2J")

"""Text for a terminal: columns aligned under their headings, and byte counts."""

from __future__ import annotations

from collections.abc import Sequence


def align_columns(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Return a table as lines of text, headings first, indented by two spaces.

    words: number of leading columns that are aligned left; the others (numbers) are aligned right.
    """
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if place < words else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def size(number: float) -> str:
    """Return a number of bytes as text, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.4g} {unit}"
        number /= 1024
    raise AssertionError("unreachable")

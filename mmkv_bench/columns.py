"""Text for a terminal: columns under their heads, and numbers of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Lines with the heads first, indented by two: the first `words` columns to the left, the others, numbers, to the right."""
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
    """Bytes in words: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.4g} {unit}"
        number /= 1024
    raise AssertionError("unreachable")

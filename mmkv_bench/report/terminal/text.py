"""Texts and tables of a terminal: as wide as it is, and nothing in them that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console() -> Console:
    """Standard output; 80 columns, or $COLUMNS, where it is no terminal."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def plain(text: str) -> str:
    """A model's or a user's text without control characters, which are written as escapes; line breaks stay."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[str] = (),
    wrapped: Sequence[str] = (),
) -> None:
    """Print a table of strings or rich texts; columns of `right` stand at the right edge, those of `wrapped` give way where the
    terminal is narrow."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True)
    for name in header:
        made.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name not in wrapped
        )
    for row in rows:
        made.add_row(*row)
    console.print(made)


def pairs(console: Console, told: Iterable[tuple[str, Any]]) -> None:
    """Print names with what they are, in two columns without a header."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True, style="dim")
    made.add_column(overflow="fold")
    for name, value in told:
        made.add_row(name, value)
    console.print(made)


LONGEST = 20_000
"""Characters of a text that are shown; rich takes minutes to lay out ten million."""
MARK = ">>"
"""Stands where an answer leaves that of `full`."""


def cut(text: str) -> str:
    """The plain beginning of a text, and how much of it is not shown."""
    more = f" [{len(text) - LONGEST:,} more characters]" if len(text) > LONGEST else ""
    return plain(text[:LONGEST]) + more


def marked(text: str, at: int | None) -> Text:
    """A text, cut, with a mark before its `at`-th character, and what follows in another style; None: as it is."""
    from rich.text import Text

    if at is None or at > LONGEST:
        return Text(cut(text))
    made = Text(plain(text[:at]))
    made.append(MARK, style="bold")
    return made.append(cut(text)[len(plain(text[:at])) :], style="bold")

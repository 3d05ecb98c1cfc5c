"""Tables as they are printed, in no format yet: sections of a heading, grids, sentences and notes, and markdown of them.

Markdown is aligned so that it reads well in a terminal too; `html_page.py` writes the same sections as a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONG = 10
"""So many sections have their contents before them."""


@dataclass(frozen=True)
class Text:
    """One printed table cell: `range` is the interval or "", `marks` what follows the number, `cells` the hashes behind it;
    `behind`: sentences on where it is from, which a page opens at the cell."""

    number: str
    range: str = ""
    marks: tuple[str, ...] = ()
    bold: bool = False
    cells: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A table: a header, and rows of as many cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[Text | str]]


@dataclass(frozen=True)
class Label:
    """What stands above one of several grids."""

    words: str


@dataclass(frozen=True)
class Notes:
    """Sentences below a table, each by itself."""

    lines: Sequence[str]


Block = Grid | Label | Notes | str
"""What a section is made of; a text is a paragraph."""


@dataclass(frozen=True)
class Section:
    """One table with all that belongs to it. short: its caption among the contents, `caption` unless given; name: what a link
    calls it, its number unless given."""

    title: str
    caption: str
    body: tuple[Block, ...]
    short: str = ""
    name: str = ""

    @property
    def entry(self) -> str:
        """Its line among the contents."""
        return ": ".join(filter(None, (self.title, self.short or self.caption)))


def as_markdown(sections: Sequence[Section]) -> str:
    """All sections, their contents before them where they are many."""
    texts = [_contents(sections)] if len(sections) >= LONG else []
    return "\n".join([*texts, *map(_markdown, sections)])


def _contents(sections: Sequence[Section]) -> str:
    lines = [f"{number}. {section.entry}" for number, section in enumerate(sections, 1)]
    return "\n".join([f"{len(sections)} tables:", "", *lines]) + "\n"


def _markdown(section: Section) -> str:
    heading = ": ".join(filter(None, (f"**{section.title}**", section.caption)))
    return "\n\n".join([heading, *map(_block, section.body)]) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Grid):
        return aligned(block.header, [[_cell(cell) for cell in row] for row in block.rows])
    if isinstance(block, Notes):
        return "\n".join(f"- {line}" for line in block.lines)
    return f"*{block.words}*" if isinstance(block, Label) else block


def _cell(cell: Text | str) -> str:
    if isinstance(cell, str):
        return cell
    number = f"**{cell.number}**" if cell.bold else cell.number
    return " ".join(part for part in (number, cell.range, "".join(cell.marks)) if part)


def aligned(header: Sequence[str], grid: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a fixed-width font."""
    lines = [list(header), *map(list, grid)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])

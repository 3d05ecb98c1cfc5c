"""The table type that all builders make (scores, costs, groups of datasets, papers' tables) and `formats.write` writes.

Builders do not depend on the output format, and writers do not depend on the kind of table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import Any, NamedTuple

from mmkv_bench.errors import ConfigError, nearest

MOST_NOTES = 5
"""Number of notes below a table if they are `short`."""

NOTES = ("none", "short", "all")
"""Allowed amounts of notes below a table."""


class VerdictStyle(NamedTuple):
    """Sign and colour of a verdict word. colour: a key of `COLOURS`, the CSS class in html and the colour's name in LaTeX."""

    sign: str
    colour: str


COLOURS = {"good": "00704F", "bad": "B34700", "open": "4B5D8A", "quiet": "666666"}
"""Colour class -> RGB. The colours differ for colour-blind readers too; each has at least 4.5:1 contrast on white."""

VERDICTS = {
    "agrees": VerdictStyle("✓", "good"),
    "confirmed": VerdictStyle("✓", "good"),
    "differs": VerdictStyle("✗", "bad"),
    "contradicted": VerdictStyle("✗", "bad"),
    "undecided": VerdictStyle("?", "open"),
    "uninformative": VerdictStyle("○", "quiet"),
    "not comparable": VerdictStyle("≠", "quiet"),
    "holds": VerdictStyle("✓", "good"),
    "fails": VerdictStyle("✗", "bad"),
    "not tested": VerdictStyle("·", "quiet"),
    "ambiguous sentence": VerdictStyle("?", "open"),
    "not run": VerdictStyle("·", "quiet"),
    "cannot run": VerdictStyle("⊘", "quiet"),
    "waiting": VerdictStyle("…", "open"),
    "failed": VerdictStyle("✗", "bad"),
    "ambiguous": VerdictStyle("?", "open"),
}
"""Word for a verdict, or for why a number is missing -> sign and colour of the word."""


def verdict_text(word: str) -> str:
    """Return a verdict word after its sign, such as "✓ agrees"; a word without a sign is returned alone."""
    return f"{VERDICTS[word].sign} {word}" if word in VERDICTS else word


class Rank(IntEnum):
    """Importance of a note, the most important first."""

    WARNING = 0
    """Without the note, a reader would misunderstand the numbers."""
    MARK = 1
    """Meaning of bold, of a mark or of a column."""
    READING = 2
    """Context of the numbers."""
    DETAIL = 3
    """Lists of cells, samples and settings."""


@dataclass(frozen=True)
class Note:
    text: str
    rank: Rank = Rank.READING


@dataclass(frozen=True)
class GridCell:
    """One printed cell.

    Attributes:
        text: printed text without interval, marks and verdict.
        value: the number; None if the text is no number.
        interval: such as `[0.71, 0.80]`, or "".
        marks: signs such as † behind the number. Notes explain them.
        verdict: a key of `VERDICTS`, or a word that is printed without a sign.
        hashes: hashes of the stored settings whose answers gave the number.
        details: sentences that the html page shows on request.
        span: number of columns that the cell covers in LaTeX, which skips the cells behind it; 0: one column.
        further: cells that are printed in the same place, behind this one.
    """

    text: str
    value: float | None = None
    interval: str = ""
    marks: tuple[str, ...] = ()
    bold: bool = False
    verdict: str = ""
    hashes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    span: int = 0
    further: tuple[GridCell, ...] = ()

    @property
    def look(self) -> VerdictStyle | None:
        return VERDICTS.get(self.verdict)


@dataclass(frozen=True)
class Grid:
    """A header, and rows with as many cells; a text in a row stands for a cell with only this text.

    In LaTeX, a grid whose header is part of the first grid's header (ranks, common samples) continues the first grid.

    heading: printed above the grid. labels: number of leading columns that name the row. groups: name of the column group of
    every other column, or empty.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[GridCell | str]]
    heading: str = ""
    labels: int = 1
    groups: Sequence[str] = ()

    @property
    def spans(self) -> list[tuple[str, int]]:
        """(name, number of columns) of each column group, in order."""
        return [(name, len(list(columns))) for name, columns in groupby(self.groups)]

    @property
    def cells(self) -> list[list[GridCell]]:
        """The rows, with every text converted to a `GridCell`."""
        return [[GridCell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]


Records = Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Table:
    """One table.

    short: caption in a list of contents; if empty, `caption` is used.
    name: name in links and LaTeX labels; if empty, the table's number is used.
    records: returns the unrounded lines of csv. Only the csv writer calls it.
    """

    title: str
    caption: str
    grids: Sequence[Grid]
    notes: Sequence[Note] = ()
    short: str = ""
    name: str = ""
    records: Records = tuple

    @property
    def entry(self) -> str:
        """The table's line in a list of contents."""
        return ": ".join(filter(None, (self.title, self.short or self.caption)))

    def split_notes(self, how: str = "short") -> tuple[list[str], list[str]]:
        """Return (texts of printed notes, texts of hidden notes), the most important first.

        how: one of `NOTES`. `short` prints `MOST_NOTES` notes, or more if there are more warnings and meanings of marks.
            `none` returns two empty lists.
        """
        if how == "none":
            return [], []
        notes = sorted(self.notes, key=lambda note: note.rank)
        needed_notes = sum(note.rank <= Rank.MARK for note in notes)
        texts = [note.text for note in notes]
        shown_count = max(MOST_NOTES, needed_notes)
        if how == "all" or shown_count + 1 == len(texts):  # "1 more note" would be as long as the note
            shown_count = len(texts)
        return texts[:shown_count], texts[shown_count:]


def rename_lines(tables: Sequence[Table], names: Sequence[str]) -> list[Table]:
    """Return the tables with other names for some rows. The csv records keep the old names.

    Args:
        names: strings `line=name`, where `line` is the printed name of a row. If `line` lacks the row's ending in parentheses,
            the ending is added to `name`.

    Raises:
        ConfigError: no row is called `line`, or another row is called `name`.
    """
    labels = {row[0].text for table in tables for grid in table.grids for row in grid.cells if row}
    lines = labels | {text.partition(" (")[0] for text in labels}
    new_names: dict[str, str] = {}
    for text in names:
        splits = [(text[: at.start()], text[at.end() :]) for at in re.finditer("=", text)]
        line, name = next((split for split in reversed(splits) if split[0] in lines), ("", ""))
        if not line:
            old_name, equals, _ = text.partition("=")
            advice = nearest(old_name, lines) if equals else "write --name <line>=<name>"
            raise ConfigError(f"--name {text}: no table has such a line; {advice}")
        if not name or name in {*labels, *new_names.values()} - {line}:
            raise ConfigError(
                f"--name {text}: {'the name is empty' if not name else f'{name} is another line'}; choose another name"
            )
        new_names[line] = name
    return [_renamed(table, new_names) for table in tables] if new_names else list(tables)


def replace_caption(tables: Sequence[Table], caption: str | None) -> list[Table]:
    """Return the only table with `caption` as its title and without further caption; None changes nothing.

    Raises:
        ConfigError: `caption` is given and there is not exactly one table.
    """
    if caption is None:
        return list(tables)
    if len(tables) != 1:
        raise ConfigError(
            f"--caption needs exactly one table, but there are {len(tables)}; choose one with --dataset, --metric or --protocol, "
            "or use --join"
        )
    return [replace(tables[0], title=caption, caption="", short="")]


def _renamed(table: Table, new: Mapping[str, str]) -> Table:
    any_line = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))
    # Renames a name only before punctuation or these words: "full" in "the full cache" is no line.
    name_pattern = re.compile(rf"(?<![\w-])({any_line})(?=$|[:;,.)]| \(| at | and | by | on )")

    def cell(one: GridCell) -> GridCell:
        line = one.text if one.text in new else one.text.partition(" (")[0]
        return replace(one, text=new[line] + one.text[len(line) :]) if line in new else one

    grids = [replace(grid, rows=[[cell(one) for one in row] for row in grid.cells]) for grid in table.grids]
    notes = [replace(note, text=name_pattern.sub(lambda found: new[found[1]], note.text)) for note in table.notes]
    return replace(table, grids=grids, notes=notes)

"""Writers of tables: markdown, csv and html in this file, LaTeX in `latex`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mmkv_bench.tables.latex import latex
from mmkv_bench.tables.table import COLOURS, Grid, GridCell, Table

HASHES = "Small below a number: the cells behind it; `mmkv-bench show <rows> <hash>` prints one of them."
LONG = 10
"""From this number of tables on, markdown begins with a list of contents."""


def html(tables: Sequence[Table], title: str, *, notes: str = "short") -> str:
    """Return an HTML document: a linked list of contents, then every table. notes: the notes shown open, one of `NOTES`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(  # noqa: S701 - every text goes through a filter that escapes it
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    templates.filters |= {"inline": _inline, "e": escape}
    has_hashes = any(cell.hashes for table in tables for grid in table.grids for row in grid.cells for cell in row)
    page_template = templates.get_template("page.html")
    return page_template.render(
        tables=tables, title=title, notes=notes, colours=COLOURS, hashes=HASHES if has_hashes else ""
    )


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def write(tables: Sequence[Table], form: str, *, title: str = "Tables", notes: str = "short") -> str:
    """Return the tables as text. form: md, csv, latex or html. title: title of an html page. notes: one of `NOTES`."""
    if form == "csv":
        return csv_text([record for table in tables for record in table.records()])
    if form == "latex":
        return latex(tables, notes=notes)
    return html(tables, title, notes=notes) if form == "html" else markdown(tables, notes=notes)


def markdown(tables: Sequence[Table], *, notes: str = "short") -> str:
    """Return all tables as markdown, with a list of contents if there are at least `LONG`."""
    contents = [f"{number}. {table.entry}" for number, table in enumerate(tables, 1)]
    contents_text = ["\n".join([f"{len(tables)} tables:", "", *contents]) + "\n"] if len(tables) >= LONG else []
    return "\n".join([*contents_text, *(_section(table, notes) for table in tables)])


def _section(table: Table, notes: str) -> str:
    blocks = [": ".join(filter(None, (f"**{table.title}**", table.caption)))]
    for grid in table.grids:
        blocks += [f"*{grid.heading}*"] if grid.heading else []
        blocks.append(_grid(grid))
    printed_notes, hidden_notes = table.split_notes(notes)
    lines = [f"- {note}" for note in printed_notes] + (
        [f"- {len(hidden_notes)} more notes with `--notes`"] if hidden_notes else []
    )
    blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks) + "\n"


def _grid(grid: Grid) -> str:
    group_names = [*[""] * grid.labels, *grid.groups] if grid.groups else [""] * len(grid.header)
    header = [" ".join(filter(None, both)) for both in zip(group_names, grid.header, strict=True)]
    return aligned(header, [[_cell(cell) for cell in row] for row in grid.cells])


def _cell(cell: GridCell) -> str:
    number = f"**{cell.text}**" if cell.bold else cell.text
    verdict = " ".join(filter(None, (cell.look.sign if cell.look else "", cell.verdict)))
    text = " ".join(filter(None, (number, cell.interval, verdict, "".join(cell.marks))))
    return "; ".join([text, *map(_cell, cell.further)])


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table whose columns line up in a fixed-width font."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records with equal keys as csv. The keys are the header; None becomes an empty field."""
    text_buffer = io.StringIO()
    if records:
        writer = csv.DictWriter(text_buffer, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: quote_formula(value) for key, value in record.items()} for record in records)
    return text_buffer.getvalue()


def quote_formula(value: Any) -> Any:
    """Put a quote before a text that a spreadsheet would run as a formula; return other values and numbers unchanged."""
    if not isinstance(value, str) or len(value) < 2 or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value

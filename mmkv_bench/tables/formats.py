"""Writers of tables: markdown, csv and html here, LaTeX in a file of its own; `write` chooses by the format's name.

Markdown is aligned, so that it reads well in a terminal too.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from mmkv_bench.tables.latex import latex
from mmkv_bench.tables.table import COLOURS, Grid, GridCell, Table

HASHES = "Small below a number: the cells behind it; `mmkv-bench show <rows> <hash>` prints one of them."
_STYLE = """:root{color-scheme:light dark;--line:#c8c8c8;--quiet:#595959;--raised:#f3f4f6}
@media(prefers-color-scheme:dark){:root{--line:#4a4d52;--quiet:#b4b4b4;--raised:#23262b}td span{filter:brightness(1.9)}}
body{margin:0 auto;padding:0 1.2rem 2rem;max-width:100rem;font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .2rem}h3{font-size:1rem;margin:1rem 0 .2rem}
p,ul{margin:.3rem 0;max-width:75rem}.quiet,li,small,summary{color:var(--quiet)}nav li{color:inherit}td summary{color:inherit}
.wide{overflow-x:auto}summary{cursor:pointer}td details p{max-width:45ch;font-size:13px;overflow-wrap:anywhere}
table{border-collapse:collapse;margin:.5rem 0;font-size:14px}
th,td{border:1px solid var(--line);padding:.2rem .55rem;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}
thead th{background:var(--raised)}tbody th{font-weight:400}small{display:block;font:11px/1.3 ui-monospace,monospace}
@media print{section{break-inside:avoid}body{font-size:11px}}
""" + "".join(f".{name}{{color:#{colour}}}" for name, colour in COLOURS.items())


def html(tables: Sequence[Table], title: str, *, notes: str = "short") -> str:
    """A whole document: contents with links, then every table. notes: those that are open, one of `NOTES`."""
    names = [table.name or f"table-{number}" for number, table in enumerate(tables, 1)]
    links = [
        f'<li><a href="#{escape(name)}">{_inline(table.entry)}</a></li>'
        for name, table in zip(names, tables, strict=True)
    ]
    contents = ['<nav aria-label="Contents">', "<ol>", *links, "</ol>", "</nav>"] if len(tables) > 1 else []
    hashes = any(cell.hashes for table in tables for grid in table.grids for row in grid.cells for cell in row)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            *contents,
            *(_html_section(name, table, notes) for name, table in zip(names, tables, strict=True)),
            *([f'<p class="quiet">{_inline(HASHES)}</p>'] if hashes else []),
            "</body>",
            "</html>",
            "",
        ]
    )


def _html_section(name: str, table: Table, notes: str) -> str:
    shown, hidden = table.split_notes(notes)
    more = [f"<details><summary>{len(hidden)} more notes</summary>", _html_list(hidden), "</details>"] if hidden else []
    return "\n".join(
        [
            f'<section id="{escape(name)}">',
            f"<h2>{_inline(table.title)}</h2>",
            *([f"<p>{_inline(table.caption)}</p>"] if table.caption else []),
            *map(_html_grid, table.grids),
            *([_html_list(shown)] if shown else []),
            *more,
            "</section>",
        ]
    )


def _html_list(notes: Sequence[str]) -> str:
    return "\n".join(["<ul>", *(f"<li>{_inline(note)}</li>" for note in notes), "</ul>"])


def _html_grid(grid: Grid) -> str:
    heading = [f"<h3>{_inline(grid.heading)}</h3>"] if grid.heading else []
    head = "".join(f'<th scope="col">{_inline(word)}</th>' for word in grid.header)
    groups = f'<th colspan="{grid.labels}"></th>' if grid.groups else ""
    for group, columns in groupby(grid.groups):
        groups += f'<th scope="colgroup" colspan="{len(list(columns))}">{_inline(group)}</th>'
    above = [f"<tr>{groups}</tr>"] if groups else []
    rows = [_html_row(row, grid.labels) for row in grid.cells]
    table = ['<div class="wide"><table>', "<thead>", *above, f"<tr>{head}</tr>", "</thead>", "<tbody>", *rows]
    return "\n".join([*heading, *table, "</tbody>", "</table></div>"])


def _html_row(row: Sequence[GridCell], labels: int) -> str:
    names = "".join(f'<th scope="row">{_html_cell(cell)}</th>' for cell in row[:labels])
    return f"<tr>{names}" + "".join(f"<td>{_html_cell(cell)}</td>" for cell in row[labels:]) + "</tr>"


def _html_cell(cell: GridCell) -> str:
    number = _inline(cell.text)
    number = f"<b>{number}</b>" if cell.bold else number
    verdict = _inline(cell.verdict)
    if cell.look is not None:
        verdict = f'<span class="{cell.look.colour}">{cell.look.sign} {verdict}</span>'
    words = " ".join(filter(None, (number, escape(cell.interval), verdict, escape("".join(cell.marks)))))
    shown = words + (f"<small>{escape(' '.join(cell.hashes))}</small>" if cell.hashes else "")
    details = "".join(f"<p>{_inline(line)}</p>" for line in cell.details)
    text = f"<details><summary>{shown}</summary>{details}</details>" if details else shown
    return "; ".join([text, *map(_html_cell, cell.further)])


def _inline(text: str) -> str:
    """A text of notes and captions, in which `code` alone is a sign."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


FORMATS = ("md", "csv", "latex", "html")
LONG = 10
"""From so many tables on, a list of contents stands before them."""


def write(tables: Sequence[Table], form: str, *, title: str = "Tables", notes: str = "short") -> str:
    """The tables in one of `FORMATS`.

    Args:
        title: of an html page. notes: one of `NOTES`.
    """
    if form == "csv":
        return csv_text([record for table in tables for record in table.records()])
    if form == "latex":
        return latex(tables, notes=notes)
    return html(tables, title, notes=notes) if form == "html" else markdown(tables, notes=notes)


def markdown(tables: Sequence[Table], *, notes: str = "short") -> str:
    """All tables, with a list of contents where they are many."""
    contents = [f"{number}. {table.entry}" for number, table in enumerate(tables, 1)]
    head = ["\n".join([f"{len(tables)} tables:", "", *contents]) + "\n"] if len(tables) >= LONG else []
    return "\n".join([*head, *(_section(table, notes) for table in tables)])


def _section(table: Table, notes: str) -> str:
    blocks = [": ".join(filter(None, (f"**{table.title}**", table.caption)))]
    for grid in table.grids:
        blocks += [f"*{grid.heading}*"] if grid.heading else []
        blocks.append(_grid(grid))
    shown, hidden = table.split_notes(notes)
    lines = [f"- {note}" for note in shown] + ([f"- {len(hidden)} more notes with `--notes`"] if hidden else [])
    blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks) + "\n"


def _grid(grid: Grid) -> str:
    named = [*[""] * grid.labels, *grid.groups] if grid.groups else [""] * len(grid.header)
    header = [" ".join(filter(None, both)) for both in zip(named, grid.header, strict=True)]
    return aligned(header, [[_cell(cell) for cell in row] for row in grid.cells])


def _cell(cell: GridCell) -> str:
    number = f"**{cell.text}**" if cell.bold else cell.text
    verdict = " ".join(filter(None, (cell.look.sign if cell.look else "", cell.verdict)))
    text = " ".join(filter(None, (number, cell.interval, verdict, "".join(cell.marks))))
    return "; ".join([text, *map(_cell, cell.further)])


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a fixed-width font."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records that have the same keys, with these as the header; an empty field for null."""
    out = io.StringIO()
    if records:
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: inert(value) for key, value in record.items()} for record in records)
    return out.getvalue()


def inert(value: Any) -> Any:
    """A field that no spreadsheet takes for a formula: a text that begins like one gets a quote before it; numbers stay."""
    if not isinstance(value, str) or len(value) < 2 or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value

"""Sections of tables as one page, which opens offline: it holds its style and asks for nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from mmkv_bench.tables.sections import Block, Grid, Label, Notes, Section, Text

HASHES = "Small below a number: the cells behind it; `mmkv-bench show <rows> <hash>` says all of one."
_STYLE = """:root{color-scheme:light dark;--line:#c8c8c8;--quiet:#595959;--raised:#f3f4f6}
@media(prefers-color-scheme:dark){:root{--line:#4a4d52;--quiet:#b4b4b4;--raised:#23262b}}
body{margin:0 auto;padding:0 1.2rem 2rem;max-width:100rem;font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .2rem}h3{font-size:1rem;margin:1rem 0 .2rem}
p,ul{margin:.3rem 0;max-width:75rem}.quiet,li,small{color:var(--quiet)}nav li{color:inherit}
.wide{overflow-x:auto}summary{cursor:pointer}details p{max-width:45ch;font-size:13px;overflow-wrap:anywhere}
table{border-collapse:collapse;margin:.5rem 0;font-size:14px}
th,td{border:1px solid var(--line);padding:.2rem .55rem;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}
thead th{background:var(--raised)}tbody th{font-weight:400}small{display:block;font:11px/1.3 ui-monospace,monospace}
@media print{section{break-inside:avoid}body{font-size:11px}}"""


def page(title: str, sections: Sequence[Section]) -> str:
    """A whole document: contents with links, then every section. title: of the page."""
    names = [section.name or f"table-{number}" for number, section in enumerate(sections, 1)]
    links = [f'<li><a href="#{name}">{_inline(one.entry)}</a></li>' for name, one in zip(names, sections, strict=True)]
    contents = ['<nav aria-label="Contents">', "<ol>", *links, "</ol>", "</nav>"] if len(sections) > 1 else []
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
            *(_section(name, section) for name, section in zip(names, sections, strict=True)),
            *([f'<p class="quiet">{_inline(HASHES)}</p>'] if any(map(_has_cells, sections)) else []),
            "</body>",
            "</html>",
            "",
        ]
    )


def _has_cells(section: Section) -> bool:
    grids = [block for block in section.body if isinstance(block, Grid)]
    return any(isinstance(cell, Text) and cell.cells for grid in grids for row in grid.rows for cell in row)


def _section(name: str, section: Section) -> str:
    caption = [f"<p>{_inline(section.caption)}</p>"] if section.caption else []
    heading = f"<h2>{_inline(section.title)}</h2>"
    return "\n".join([f'<section id="{escape(name)}">', heading, *caption, *map(_block, section.body), "</section>"])


def _block(block: Block) -> str:
    if isinstance(block, Grid):
        head = "".join(f'<th scope="col">{_inline(word)}</th>' for word in block.header)
        rows = [_row(row) for row in block.rows]
        body = ["<tbody>", *rows, "</tbody>"]
        return "\n".join(['<div class="wide"><table>', f"<thead><tr>{head}</tr></thead>", *body, "</table></div>"])
    if isinstance(block, Notes):
        return "\n".join(["<ul>", *(f"<li>{_inline(line)}</li>" for line in block.lines), "</ul>"])
    return f"<h3>{_inline(block.words)}</h3>" if isinstance(block, Label) else f"<p>{_inline(block)}</p>"


def _row(row: Sequence[Text | str]) -> str:
    first, *others = map(_cell, row)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>"


def _cell(cell: Text | str) -> str:
    if isinstance(cell, str):
        return _inline(cell)
    number = f"<b>{escape(cell.number)}</b>" if cell.bold else escape(cell.number)
    words = " ".join(part for part in (number, escape(cell.range), escape("".join(cell.marks))) if part)
    shown = words + (f"<small>{escape(' '.join(cell.cells))}</small>" if cell.cells else "")
    told = "".join(f"<p>{_inline(line)}</p>" for line in cell.behind)
    return f"<details><summary>{shown}</summary>{told}</details>" if told else shown


def _inline(text: str) -> str:
    """Words of markdown: `code` alone means something in them."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))

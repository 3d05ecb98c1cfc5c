r"""The LaTeX writer. A table that fits a page is a float; a longer table is a `longtable`.

A table has the largest letters, at least 6 pt, in which the widest grid fits the page. If 6 pt is too wide, headers break into
lines; then the page is turned to landscape; then the columns are split into several grids. UTF-8 marks become commands, so that
any engine prints them. The first line names the `PACKAGES` to load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from mmkv_bench.tables.table import COLOURS, VERDICTS, Grid, GridCell, Table

PACKAGES = {
    "amssymb": r"\checkmark",
    "array": r"\arraybackslash",
    "booktabs": r"\toprule",
    "longtable": r"\begin{longtable}",
    "pdflscape": r"\begin{landscape}",
    "xcolor": r"\textcolor",
}
"""Package -> text that occurs in tables that need the package."""
_ESCAPES = {sign: f"\\{sign}" for sign in "{}_%&#$"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "†": r"\dag{}",
    "§": r"\S{}",
    "¶": r"\P{}",
    "‡": r"\ddag{}",
    "◊": r"\ensuremath{\diamond}",
    "∥": r"\ensuremath{\parallel}",
    "✓": r"\ensuremath{\checkmark}",
    "✗": r"\ensuremath{\times}",
    "○": r"\ensuremath{\circ}",
    "≠": r"\ensuremath{\neq}",
    "⊘": r"\ensuremath{\oslash}",
}
_FLOATS_PER_CLEARPAGE = 10  # tables between page breaks; LaTeX fails if 18 floats wait for a page
_TEXT_AREA_PT = (345.0, 550.0)  # width and height of the narrowest text of class article, in points
_SIZES = ((10, ""), (9, r"\small"), (8, r"\footnotesize"), (7, r"\scriptsize"), (6, r"\fontsize{6}{7}\selectfont"))
_EM_PT = {10: 10.0, 9: 9.25, 8: 8.5, 7: 8.0, 6: 7.3}  # size -> width of a letter m in points
_NO_SMALLER = r"\let\scriptsize\relax\def\textsuperscript#1{\raisebox{.4ex}{#1}}"
_WIDEST_COLUMN_PT = 150.0  # points; a wider column becomes a paragraph of this width


@dataclass(frozen=True)
class _Setting:
    """Letter size and page of a table. stacked: headers break into lines. across, down: size of the text area in points."""

    size: int
    command: str
    landscape: bool
    stacked: bool

    @property
    def across(self) -> float:
        return _TEXT_AREA_PT[self.landscape]

    @property
    def down(self) -> float:
        return 0.94 * _TEXT_AREA_PT[not self.landscape]

    @property
    def gap(self) -> float:
        """Space on either side of a column, in points."""
        return 6.0 if self.size > 8 else 3.0


def escape(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def latex(tables: Sequence[Table], *, notes: str = "short") -> str:
    """Return all tables as LaTeX. notes: the notes printed below a table, one of `NOTES`. Of `short`, the others are comments."""
    has_colours = any(cell.look for table in tables for grid in table.grids for row in grid.cells for cell in row)
    used_colours = {look.colour for look in VERDICTS.values()} if has_colours else set()
    texts = [_table(table, notes) for table in tables]
    needed_packages = [package for package, sign in PACKAGES.items() if any(sign in text for text in texts)]
    first_line = [f"% needs {', '.join(needed_packages)}"]
    first_line += [rf"\definecolor{{{name}}}{{HTML}}{{{COLOURS[name]}}}" for name in COLOURS if name in used_colours]
    clearpage_numbers = {*range(_FLOATS_PER_CLEARPAGE, len(texts), _FLOATS_PER_CLEARPAGE)}
    return "\n".join(
        [*first_line, *(text + "\\clearpage\n" * (number in clearpage_numbers) for number, text in enumerate(texts, 1))]
    )


def _table(table: Table, how: str) -> str:
    setting, grids = _fit(table.grids)
    printed_notes, hidden_notes = table.split_notes(how)
    notes = (
        [r"\par\smallskip\footnotesize\raggedright " + r" \\ ".join(map(escape, printed_notes))]
        if printed_notes
        else []
    )
    notes += [f"% {' '.join(note.split())}" for note in hidden_notes]
    title = escape(". ".join(filter(None, (table.title, table.caption))))
    name = "".join(character if character.isalnum() or character == "-" else "-" for character in table.name)
    caption = [rf"\caption{{{title}}}", *([rf"\label{{tab:{name}}}"] if name else [])]
    size = [setting.command] if setting.command else []
    size += [_NO_SMALLER] if setting.size < 8 else []
    size += [rf"\setlength{{\tabcolsep}}{{{setting.gap:g}pt}}"] if setting.gap < 6 else []
    groups = _group_grids(grids)
    height = sum(_height(group, setting) for group in groups) + 11 * len(title) / setting.across * 5
    height += sum(10 * ceil(_width(note, 8) / setting.across) for note in printed_notes)
    if not setting.landscape and height <= setting.down:
        body = [line for group in groups for line in _tabular(group, setting)]
        return "\n".join([r"\begin{table}", r"\centering", *caption, *size, *body, *notes, r"\end{table}", ""])
    lines = [r"\begin{landscape}"] if setting.landscape else []
    lines += [r"\begingroup", r"\setlength{\LTcapwidth}{\linewidth}", *size]
    for number, group in enumerate(groups):
        lines += _longtable(group, setting, [] if number else [*caption, r"\\"])
    return "\n".join([*lines, *notes, r"\par\endgroup", *([r"\end{landscape}"] if setting.landscape else []), ""])


def _fit(grids: Sequence[Grid]) -> tuple[_Setting, list[Grid]]:
    """Return the first setting in which all grids fit the width, and the grids, which are split if no setting fits."""
    for landscape, stacked, (size, command) in product((False, True), (False, True), _SIZES):
        setting = _Setting(size, command, landscape, stacked)
        if all(sum(_widths(group, setting)) <= setting.across for group in _group_grids(grids)):
            return setting, list(grids)
    setting = _Setting(*_SIZES[2], True, True)
    return setting, [part for grid in grids for part in _split_columns(grid, setting)]


def _split_columns(grid: Grid, setting: _Setting) -> Iterator[Grid]:
    widths = _widths([grid], setting)
    column_parts: list[list[int]] = [[]]
    for column in range(grid.labels, len(grid.header)):
        used_width = sum(widths[: grid.labels]) + sum(widths[other] for other in column_parts[-1])
        if column_parts[-1] and used_width + widths[column] > setting.across:
            column_parts.append([])
        column_parts[-1].append(column)
    for part in column_parts:
        part_columns = [*range(grid.labels), *part]
        rows = [[_in_part(row, column, part) for column in part_columns] for row in grid.cells]
        groups = [grid.groups[column - grid.labels] for column in part] if grid.groups else ()
        yield replace(grid, header=[grid.header[column] for column in part_columns], rows=rows, groups=groups)


def _in_part(row: Sequence[GridCell], column: int, part: Sequence[int]) -> GridCell:
    """Return a row's cell at `column` for a grid reduced to the columns `part`, with its span cut to these columns.

    If a cell of an earlier column spans the first column of `part`, that cell is returned for the first column.
    """
    if column not in part:
        return row[column]
    covering_columns = (at for at in range(column) if at + row[at].span > column)
    first_column = next(covering_columns, column) if column == part[0] else column
    span = min(row[first_column].span + first_column - column, part[-1] + 1 - column)
    return replace(row[first_column], span=span if span > 1 else 0)


def _group_grids(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Group the grids that become one tabular: grids with headings, whose columns are among those of the group's first grid."""
    groups: list[list[Grid]] = []
    for grid in grids:
        may_join = bool(groups and grid.heading and not grid.groups and grid.labels == groups[-1][0].labels)
        if may_join and set(grid.header) <= set(groups[-1][0].header):
            groups[-1].append(grid)
        else:
            groups.append([grid])
    return groups


def _tabular(grids: Sequence[Grid], setting: _Setting) -> list[str]:
    first_grid = grids[0]
    heading = [rf"\par\smallskip {escape(first_grid.heading)}\par\smallskip"] if first_grid.heading else []
    lines = [rf"\begin{{tabular}}{{{_columns(grids, setting)}}}", r"\toprule", *_header(grids, setting), r"\midrule"]
    return [*heading, *lines, *_rows(grids), r"\bottomrule", r"\end{tabular}"]


def _longtable(grids: Sequence[Grid], setting: _Setting, caption: Sequence[str]) -> list[str]:
    first_grid = grids[0]
    heading = rf"\multicolumn{{{len(first_grid.header)}}}{{l}}{{\itshape {escape(first_grid.heading)}}} \\"
    lines = [
        rf"\begin{{longtable}}{{{_columns(grids, setting)}}}",
        *caption,
        *([heading] if first_grid.heading else []),
    ]
    lines += [r"\toprule", *_header(grids, setting), r"\midrule", r"\endhead"]
    return [*lines, *_rows(grids), r"\bottomrule", r"\end{longtable}"]


def _header(grids: Sequence[Grid], setting: _Setting) -> list[str]:
    grid, widths = grids[0], _widths(grids, setting)
    names = [_stack_lines(lines) for lines in _headings(grids, setting)]
    groups, rules, first_column = [""] * grid.labels, "", grid.labels + 1
    for name, count in grid.spans:
        lines = _break_lines(
            name, sum(widths[first_column - 1 : first_column - 1 + count]) - 2 * setting.gap, setting.size
        )
        groups.append(rf"\multicolumn{{{count}}}{{c}}{{{_stack_lines(lines)}}}")
        rules += rf"\cmidrule(lr){{{first_column}-{first_column + count - 1}}}" if name else ""
        first_column += count
    group_rows = [" & ".join(groups) + r" \\", rules] if grid.groups else []
    return [*group_rows, " & ".join(names) + r" \\"]


def _headings(grids: Sequence[Grid], setting: _Setting) -> list[list[str]]:
    if not setting.stacked:
        return [[name] for name in grids[0].header]
    column_widths = _widths(grids, setting)
    return [
        _break_lines(name, width - 2 * setting.gap, setting.size)
        for name, width in zip(grids[0].header, column_widths, strict=True)
    ]


def _break_lines(name: str, width: float, size: int) -> list[str]:
    """Break a header between words into lines of at most `width` points, if no word is wider."""
    lines = [""]
    for word in _words(name):
        if lines[-1] and _width(lines[-1] + word.rstrip(), size) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _stack_lines(lines: Sequence[str]) -> str:
    text = r" \\ ".join(map(escape, lines))
    return rf"\shortstack{{{text}}}" if len(lines) > 1 else text


def _words(name: str) -> list[str]:
    return re.findall(r"[^_,\s]+[_,\s]*", name) or [name]


def _rows(grids: Sequence[Grid]) -> Iterator[str]:
    header = list(grids[0].header)
    for number, grid in enumerate(grids):
        if number:
            yield r"\midrule"
            yield rf"\multicolumn{{{len(header)}}}{{l}}{{{escape(grid.heading)}}} \\"
        for row in _in_columns(grids[0], grid):
            texts, covered_columns = [], 0
            for cell in row:
                if covered_columns:
                    covered_columns -= 1
                    continue
                covered_columns = max(cell.span - 1, 0)
                text = _cell(cell)
                texts.append(rf"\multicolumn{{{cell.span}}}{{c}}{{{text}}}" if cell.span else text)
            yield " & ".join(texts) + r" \\"


def _in_columns(first: Grid, grid: Grid) -> list[list[GridCell]]:
    """Return the rows of `grid` in the columns of `first`; columns that `grid` lacks are empty."""
    if list(grid.header) == list(first.header):
        return grid.cells
    columns = {name: at for at, name in enumerate(grid.header)}
    return [[row[columns[name]] if name in columns else GridCell("") for name in first.header] for row in grid.cells]


def _cell(cell: GridCell) -> str:
    number = rf"\textbf{{{escape(cell.text)}}}" if cell.bold else escape(cell.text)
    number += rf" {{\scriptsize {escape(cell.interval)}}}" if cell.interval else ""
    if cell.look is not None:
        number += rf" \textcolor{{{cell.look.colour}}}{{{escape(cell.look.sign)} {escape(cell.verdict)}}}"
    elif cell.verdict:
        number += f" {escape(cell.verdict)}"
    number += rf"\textsuperscript{{{escape(''.join(cell.marks))}}}" if cell.marks else ""
    return "; ".join([number, *map(_cell, cell.further)])


def _columns(grids: Sequence[Grid], setting: _Setting) -> str:
    paragraph = rf">{{\raggedright\arraybackslash}}p{{{_WIDEST_COLUMN_PT - 2 * setting.gap:g}pt}}"
    kinds = ["l" if column < grids[0].labels else "c" for column in range(len(grids[0].header))]
    widths = _widths(grids, setting)
    return "".join(paragraph if width >= _WIDEST_COLUMN_PT else kind for kind, width in zip(kinds, widths, strict=True))


def _widths(grids: Sequence[Grid], setting: _Setting) -> list[float]:
    """Return the width of every column of a group of grids, gaps included, in points."""
    first = grids[0]
    widest_points = [
        max(_width(word.rstrip(), setting.size) for word in (_words(name) if setting.stacked else [name]))
        for name in first.header
    ]
    for row in (row for grid in grids for row in _in_columns(first, grid)):
        for column, cell in enumerate(row):
            widest_points[column] = max(widest_points[column], _cell_width(cell, setting.size) / max(cell.span, 1))
    return [min(width + 2 * setting.gap, _WIDEST_COLUMN_PT) for width in widest_points]


def _cell_width(cell: GridCell, size: int) -> float:
    small_size = min(size, 7)
    width = _width(cell.text, size) * (1.15 if cell.bold else 1)
    width += _width(f" {cell.interval}", small_size) if cell.interval else 0
    width += _width(f" {cell.look.sign if cell.look else ''} {cell.verdict}", size) if cell.verdict else 0
    width += _width("".join(cell.marks), small_size)
    return width + sum(_width("; ", size) + _cell_width(other, size) for other in cell.further)


def _height(grids: Sequence[Grid], setting: _Setting) -> float:
    widths = _widths(grids, setting)
    lines = max(map(len, _headings(grids, setting))) + bool(grids[0].groups) + len(grids)
    for row in (row for grid in grids for row in _in_columns(grids[0], grid)):
        pairs = zip(row, widths, strict=True)
        lines += max(
            ceil(_cell_width(cell, setting.size) / max(width - 2 * setting.gap, 1)) if width >= _WIDEST_COLUMN_PT else 1
            for cell, width in pairs
        )
    return lines * 1.2 * setting.size + 10


def _width(text: str, size: int) -> float:
    """Return an upper estimate of a text's width in Computer Modern, in points."""
    narrow_letters = sum(text.count(letter) for letter in "ijl.,:;'!|")
    wide_letters = sum(character.isupper() or character in "mw%+=<>±@_†‡§¶◊∥✓✗○" for character in text)
    return _EM_PT[size] * (
        0.3 * narrow_letters + 0.8 * wide_letters + 0.53 * (len(text) - narrow_letters - wide_letters)
    )

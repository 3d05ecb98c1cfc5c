"""Where a cell of a paper's table is from: its address, where its number is printed, which rows or command are behind ours."""

from __future__ import annotations

import shlex

from mmkv_bench.papers.address import STAND_IN
from mmkv_bench.papers.cells import number
from mmkv_bench.papers.commands import PROGRAM, command
from mmkv_bench.papers.filled_table import FilledCell, FilledTable
from mmkv_bench.papers.identity import stated
from mmkv_bench.papers.layout import TableCell, TableLayout
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, Printed
from mmkv_bench.papers.reader import COMPUTED, NOT_RUN, PART, PLANNED, UNCLEAR

_MANY = 8


def behind(page: FilledTable, one: FilledCell) -> tuple[str, ...]:
    """Sentences: the address of a cell, its printed number, ours, and what is said of the two besides its verdict."""
    printed = [] if one.printed is None else [_printed(page.spec.id, one.printed)]
    return (_address(one.cell), *_stated(one.cell), *printed, *_ours(page, one), *_limits(one), *_drop(one))


def rows_of(page: FilledTable, one: FilledCell) -> list[str]:
    """Rows folder and hash of each cell behind a number, or folder and measurement of a diagnostic."""
    return [page.sources[row] for row in one.measured.rows] or [source for source in (one.measured.source,) if source]


def command_of(spec: TableLayout, one: FilledCell) -> str:
    """What makes the rows that a cell lacks; empty where nothing can or nothing is lacking."""
    if one.measured.state not in (NOT_RUN, PART, PLANNED):
        return ""
    return "; ".join(dict.fromkeys(filter(None, (command(each, spec.experiments) for each in one.cell.needed))))


def _address(cell: TableCell) -> str:
    if not cell.parts:
        return str(cell.address)
    parts = "; ".join(map(str, cell.parts[:_MANY]))
    return f"{cell.address}: the mean of {len(cell.parts)}, {parts}{'; ...' if len(cell.parts) > _MANY else ''}"


def _stated(cell: TableCell) -> list[str]:
    """What rows must be made with to count."""
    at = cell.needed[0]
    return [f"rows count with {stated(at)}"] if at.runs and at.model != STAND_IN else []


def _printed(table: str, printed: Printed) -> str:
    unit = f" ({printed.unit})" if printed.unit else ""
    line = "" if printed.line is None else f", line {printed.line} of the paper's text"
    why = f": {printed.reason}" if printed.reason else ""
    return f"printed: {number(printed)}{unit}, results/reference/{table}.csv{line}; {printed.status}{why}"


def _ours(page: FilledTable, one: FilledCell) -> list[str]:
    own, lacking = one.measured, command_of(page.spec, one)
    if own.state == COMPUTED:
        return [f"ours: computed, {own.why}"]
    if own.state == PLANNED:
        found = [f"ours: planned, {own.why}, results/reference/planned/peaks.csv"]
    elif own.source:
        found = [f"ours: measurement {own.source.rpartition(' ')[2]} of {own.source.rpartition(' ')[0]}"]
    else:
        shows = [shlex.join([PROGRAM, "show", *source.rsplit(" ", 1)]) for source in rows_of(page, one)]
        found = [f"ours: `{line}`" for line in shows[:_MANY]]
        found += [f"and {len(shows) - _MANY} more"] if len(shows) > _MANY else []
    found += [f"{own.state}: {own.why}"] if own.state == UNCLEAR or (not found and own.why) else []
    return [*found, f"to run: `{lacking}`"] if lacking else found


def _limits(one: FilledCell) -> list[str]:
    """What a cell is judged by."""
    held = one.limits
    if held is None or one.printed is None or one.printed.status not in (COMPARABLE, OPEN, RATIOS):
        return []
    unit = " on the log scale" if held.relative else ""
    told = f"margin {held.margin:.3g}{unit}" + (f", half of what is between it and {held.rival}" if held.rival else "")
    told += f"; half of the last digit {held.half:.3g}"
    told += f", one answer of {one.measured.of or 'all'} {held.step:.3g}" if held.step else ""
    told += "; the printed number of the full cache is within it too" if held.full else ""
    return [told + ("" if held.informative else ": more than the margin, so that no word would mean anything")]


def _drop(one: FilledCell) -> list[str]:
    if one.drop is None:
        return []
    return [f"drop to full: {one.drop}" + ("" if one.counted else ", not counted since full does not agree")]

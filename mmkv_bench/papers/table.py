"""Papers' tables as `Table`: measured beside printed numbers, verdicts, notes and csv records."""

from __future__ import annotations

import io
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import floor, log10
from typing import TYPE_CHECKING, Any

from mmkv_bench.papers.address import STAND_IN
from mmkv_bench.papers.evidence import requirements
from mmkv_bench.papers.judgement import FilledCell, FilledTable
from mmkv_bench.papers.margins import CONFIRMED, CONTRADICTED, UNDECIDED, WORDS, Verdict, versions
from mmkv_bench.papers.measurement import Curve, Measurement, State
from mmkv_bench.papers.non_score_metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, Printed
from mmkv_bench.papers.runs import PROGRAM, command, commands, experiment
from mmkv_bench.tables.formats import write
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = {"md": "md", "latex": "tex", "csv": "csv", "html": "html"}
"""Format -> suffix of the files."""
SAME, NO_CELL = "←", "no such cell"
"""Texts of a place that the cell to its left covers, and of a place without a cell in the paper."""
_INCOMPLETE_STATES = (State.NOT_RUN, State.PART, State.PLANNED)
_EPSILON = 1e-9  # an interval narrower than this does not determine the number of digits


class Reasons(dict[str, str]):
    """Reason -> letter of the note below the table: a, b, ..., z, aa, ..."""

    def letter(self, reason: str) -> str:
        """Return the letter of a reason; a new reason gets the next letter."""
        number, letter = len(self), ""
        while number >= 0:
            number, letter = number // 26 - 1, chr(ord("a") + number % 26) + letter
        return self.setdefault(reason, letter)


def render(filled: Sequence[FilledTable], form: str, *, notes: str = "short") -> str:
    """Return tables as text. form: a key of `SUFFIXES`. notes: the printed notes, one of `NOTES`."""
    return write([paper_table(one) for one in filled], form, title="Tables of the papers", notes=notes)


def frame(filled: Sequence[FilledTable]) -> pd.DataFrame:
    """Return the csv records of the tables as a frame: one row per cell."""
    import pandas as pd

    return pd.read_csv(io.StringIO(render(filled, "csv")))


def paper_table(filled: FilledTable) -> Table:
    layout, reasons = filled.layout, Reasons()
    order = "measured [95%]" if layout.stands_for else "measured / printed, difference [95% of measured] verdict"
    grids = [_grid(filled, block, reasons) for block in range(len(layout.blocks))]
    return Table(
        f"{layout.title} ({layout.id})",
        f"{layout.caption}; {order}",
        [grid for grid in grids if grid.rows],
        _notes(filled, reasons),
        name=layout.id,
        records=lambda: [_record(filled, one) for one in filled.cells],
    )


def _grid(filled: FilledTable, block: int, reasons: Reasons) -> Grid:
    layout = filled.layout
    cells = {(one.cell.row, one.cell.column, one.cell.across): one for one in filled.cells if one.cell.block == block}
    columns, across = range(len(layout.columns)), range(len(layout.across))
    unsplit_columns = {
        c for c in columns if {key[2] for key in cells if key[1] == c} == {None}
    }  # methods without a budget only
    filled_pairs = {(c, a) for _, c, key in cells for a in ([key] if key is not None else across)}
    column_pairs = [
        (c, a) for c in columns for a in across if (c, a) in filled_pairs and not (c in unsplit_columns and a)
    ]
    column_cells, groups = [[pair] for pair in column_pairs], [layout.columns[c].label for c, _ in column_pairs]
    header = ["", *("" if c in unsplit_columns else layout.across[a].label for c, a in column_pairs)]
    if layout.together:
        column_cells, groups = [[(c, a) for c in columns] for a in across], []
        header = ["; ".join(column.label for column in layout.columns), *(item.label for item in layout.across)]
    elif len(layout.across) == 1:
        header, groups = ["", *groups], []
    rows = []
    for r, item in enumerate(layout.rows):
        columns_of = [[cells.get((r, c, a)) or cells.get((r, c, None)) for c, a in place] for place in column_cells]
        row = [tuple(filter(None, place)) for place in columns_of]
        if any(row):
            rows.append([GridCell(item.label), *_places(filled, row, reasons)])
    return Grid(header, rows, layout.blocks[block].label, groups=groups)


def _places(filled: FilledTable, row: Sequence[tuple[FilledCell, ...]], reasons: Reasons) -> Iterator[GridCell]:
    """Yield a `GridCell` for each column of a row. Equal neighbours, such as the full cache at all budgets, become one span.

    row: for each column, the cells that are printed together.
    """
    for ids, group in groupby(row, key=lambda place: tuple(map(id, place))):
        place, *covered_places = group
        cells = [cell for one in place for cell in cells_of(filled, one, reasons)]
        if not ids:
            yield from (GridCell(NO_CELL) for _ in (place, *covered_places))
            continue
        yield replace(cells[0], further=tuple(cells[1:]), span=len(covered_places) + 1 if covered_places else 0)
        yield from (GridCell(SAME) for _ in covered_places)


def cells_of(filled: FilledTable, one: FilledCell, reasons: Reasons) -> list[GridCell]:
    """Return a cell's number or state, further lines of a diagnostic, and numbers under other readings, as `GridCell`s."""
    measurement, printed = one.measured, "" if one.printed is None else f" / {number_text(one.printed)}"
    if measurement.value is None:
        marks = (reasons.letter(measurement.why),) if measurement.why else ()
        cells = [GridCell(f"-{printed}", verdict=measurement.state, marks=marks)]
    else:
        curves = [_number(one, line, f"{line.label} " if line.label else "") for line in measurement.curves]
        cells = curves or [_number(one, measurement)]
        if one.ratio:
            printed += ", ratio {:.3g} / {:.3g}".format(*one.ratio)
        elif one.number_pair:
            printed += f", {one.number_pair[0] - one.number_pair[1]:+.{_digits(one.printed_value.half)}f}"
        state_text = {State.MEASURED: "", State.PART: f"{State.PART} ({measurement.why}): "}.get(
            measurement.state, f"{measurement.state}: "
        )
        judged_cell = _add_verdict(cells[0], measurement, one.verdict, reasons)
        cells[0] = replace(judged_cell, text=f"{state_text}{cells[0].text}{printed}")
    cells[0] = replace(cells[0], details=details(filled, one))
    for name, reading in one.readings.items():
        if reading.value is not None:
            reading_cell = replace(_number(one, reading, f"{name} "), interval="")
            cells.append(_add_verdict(reading_cell, replace(reading, unstated=()), one.words.get(name), reasons))
    return cells


def _number(one: FilledCell, line: Measurement | Curve, label: str = "") -> GridCell:
    """Format a number with as many decimals as the printed number.

    Without a printed number, the interval's width gets two significant digits; without an interval, the number gets four.
    """
    assert line.value is not None
    has_interval = line.low is not None and line.high is not None
    decimals = max(0, 3 - floor(log10(abs(line.value)))) if line.value else 3
    if one.printed is not None and one.printed.number is not None:
        decimals = _digits(one.printed.half)
    elif line.low is not None and line.high is not None and line.high - line.low > _EPSILON:
        decimals = max(0, 1 - floor(log10(line.high - line.low)))
    interval = f"[{line.low:.{decimals}f}, {line.high:.{decimals}f}]" if has_interval else ""
    return GridCell(f"{label}{line.value:.{decimals}f}", line.value, interval)


def _add_verdict(cell: GridCell, ours: Measurement, verdict: Verdict | None, reasons: Reasons) -> GridCell:
    """Add the verdict and marks to a cell: * for contradicted facts, † for unstated facts, a letter for the reason."""
    why_text = verdict.why if verdict else "; ".join(ours.mismatches)
    marks = ["*"] if ours.mismatches else ["†"] if ours.unstated else []
    marks += [reasons.letter(why_text)] if why_text else []
    return replace(cell, verdict=verdict.word if verdict else "", marks=tuple(marks))


def number_text(printed: Printed) -> str:
    """Return a printed value as printed, or with the decimal point that the scan lost."""
    if not printed.value:
        return "unreadable"
    if printed.number is None or "." in printed.value:
        return printed.value
    return f"{printed.number:.{_digits(printed.half)}f}"


def _digits(half: float) -> int:
    return max(0, -floor(log10(2 * half) + _EPSILON)) if half else 0


def details(filled: FilledTable, one: FilledCell) -> tuple[str, ...]:
    """Return sentences on a table cell: address, printed number, source of our number, and tolerance."""
    cell, first_address, printed = one.cell, one.cell.needed_addresses[0], one.printed
    parts_text = (
        f": the mean of {len(cell.parts)}, {_first_words([str(part) for part in cell.parts])}" if cell.parts else ""
    )
    lines = [f"{cell.address}{parts_text}"]
    lines += (
        [f"rows count with {requirements(first_address)}"]
        if first_address.runs and first_address.model != STAND_IN
        else []
    )
    if printed is not None:
        unit_text = f" ({printed.unit})" if printed.unit else ""
        line_text = "" if printed.line is None else f", line {printed.line} of the paper's text"
        status_text = f"{printed.status}: {printed.reason}" if printed.reason else printed.status
        lines.append(
            f"printed: {number_text(printed)}{unit_text}, results/reference/{filled.layout.id}.csv{line_text}; {status_text}"
        )
    lines += [*_source(filled, one), *_tolerance(one)]
    if one.drop is not None:
        lines.append(f"drop to full: {one.drop}" + ("" if one.counted else ", not counted since full does not agree"))
    return tuple(lines)


def _source(filled: FilledTable, one: FilledCell) -> list[str]:
    ours, command = one.measured, _command(filled, one)
    if ours.state == State.COMPUTED:
        return [f"ours: computed, {ours.why}"]
    show_commands = [shlex.join([PROGRAM, "show", *source.rsplit(" ", 1)]) for source in _sources(filled, one)]
    lines = [f"ours: `{'`, `'.join(show_commands)}`"] if show_commands else []
    if ours.state == State.PLANNED:
        lines = [f"ours: planned, {ours.why}, results/reference/planned/peaks.csv"]
    elif ours.source:
        folder, _, measurement = ours.source.rpartition(" ")
        lines = [f"ours: measurement {measurement} of {folder}"]
    lines += [f"{ours.state}: {ours.why}"] if ours.state == State.AMBIGUOUS or (not lines and ours.why) else []
    return [*lines, f"to run: `{command}`"] if command else lines


def _tolerance(one: FilledCell) -> list[str]:
    tolerance = one.tolerance
    if tolerance is None or one.printed is None or one.printed.status not in (COMPARABLE, OPEN, RATIOS):
        return []
    tolerance_text = f"margin {tolerance.margin:.3g}{' on the log scale' if tolerance.relative else ''}"
    tolerance_text += f", half of the gap to {tolerance.rival}" if tolerance.rival else ""
    tolerance_text += f"; half of the last digit {tolerance.half:.3g}"
    tolerance_text += f", one answer of {one.measured.of or 'all'} {tolerance.step:.3g}" if tolerance.step else ""
    tolerance_text += "; the printed number of the full cache is within the margin too" if tolerance.full else ""
    return [
        tolerance_text
        + ("" if tolerance.informative else ": these exceed the margin, so no verdict would mean anything")
    ]


def _sources(filled: FilledTable, one: FilledCell) -> list[str]:
    """Return `<rows folder> <hash>` of each row behind a number, or `<folder> <measurement>` of a diagnostic."""
    return [filled.sources[row] for row in one.measured.rows] or [source for source in (one.measured.source,) if source]


def _command(filled: FilledTable, one: FilledCell) -> str:
    """Return the commands that make the missing rows of a cell, joined; "" if none are missing or no command makes them."""
    if one.measured.state not in _INCOMPLETE_STATES:
        return ""
    lines = (command(at, filled.layout.experiments) for at in one.cell.needed_addresses)
    return "; ".join(dict.fromkeys(filter(None, lines)))


def _first_words(words: Sequence[str], most: int = 8, join: str = "; ") -> str:
    more_texts = [f"and {len(words) - most} more"] if len(words) > most else []
    return join.join([*words[:most], *more_texts])


def _counts(words: Counter[str], order: Iterable[str]) -> str:
    return ", ".join(f"{words[word]} {word}" for word in order if words[word])


def _notes(filled: FilledTable, reasons: Reasons) -> list[Note]:
    layout = filled.layout
    warnings = [_stand_in(filled)] if layout.stands_for else []
    warnings.append(f"{_counts(filled.states, State)}, of {len(filled.cells)} cells{_missing(filled)}.")
    mark_texts = ["; ".join(f"{letter}: {reason}" for reason, letter in reasons.items()) + "."] if reasons else []
    if any(one.measured.mismatches for one in filled.cells):
        mark_texts.append("*: made under other conditions; shown and not judged.")
    unstated = dict.fromkeys(word for one in filled.cells for word in one.measured.unstated)
    unstated_source = "stated by no paper and no file of conf, or reported by the answers"
    mark_texts += [f"†: {unstated_source}: {'; '.join(unstated)}."] if unstated else []
    statuses = Counter((one.printed.status, one.printed.reason) for one in filled.cells if one.printed)
    verdict_remarks = _verdicts(filled) + [
        f"{status} ({count}){f': {reason}' if reason else ''}."
        for (status, reason), count in sorted(statuses.items(), key=lambda pair: -pair[1])
        if status != COMPARABLE or reason
    ]
    verdict_remarks += [f"{note}." for note in layout.notes]
    if filled.refused and not layout.stands_for:
        stand_in_kinds = "random weights, the embedded model or fixture data"
        warnings.append(f"{filled.refused} cells of {stand_in_kinds} are no evidence.")
    version_texts = [f"{name} {', '.join(values)}" for name, values in filled.versions.items()]
    passed_over = dict.fromkeys(one.measured.passed for one in filled.cells if one.measured.passed)
    details = _layers(filled) + (
        [f"made with {'; '.join(version_texts)}."] if filled.states[State.MEASURED] and version_texts else []
    )
    details += (
        [f"of several runs the fullest counts, then the newest: {'; '.join(passed_over)}."] if passed_over else []
    )
    csv_columns_text = f"columns source (for `{PROGRAM} show`) and command; html opens them at the cell"
    details.append(
        f"sources and commands of the cells: `{PROGRAM} papers {layout.id} --format csv`, {csv_columns_text}."
    )
    if statuses:
        reference_file = f"results/reference/{layout.id}.csv"
        details.append(f"printed numbers: {reference_file}; its column line is that of the paper's text.")
    ranks = {Rank.WARNING: warnings, Rank.MARK: mark_texts, Rank.READING: verdict_remarks, Rank.DETAIL: details}
    return [Note(text, rank) for rank, texts in ranks.items() for text in texts]


def _stand_in(filled: FilledTable) -> str:
    counts = sorted({one.measured.n for one in filled.cells if one.measured.n})
    size_text = f" n = {' or '.join(f'{n:,}' for n in counts)}." if counts else ""
    stores = ", ".join(f"results/tiny/{store}" for store in filled.layout.stores)
    return (
        "a stand-in: the embedded model on its own prompts. It shows that the layout of "
        f"{', '.join(filled.layout.stands_for)} can be filled, and says nothing of other models.{size_text} Rows: {stores}."
    )


def _missing(filled: FilledTable) -> str:
    """Return a text with the commands that measure all incomplete numbers; "" if there are none."""
    lacking_cells = [one for one in filled.cells if one.measured.state in _INCOMPLETE_STATES]
    experiments = filled.layout.experiments
    addresses_without_run = [
        part
        for one in lacking_cells
        for part in one.cell.needed_addresses
        if not experiments or not has_numbers(part.metric)
    ]
    lines = [f"`{experiment(name)}`" for name in experiments if lacking_cells] + [
        f"`{line}`" for line in commands(addresses_without_run)
    ]
    return f"; to run: {_first_words(lines, len(experiments) + 6, ', ')}" if lines else ""


def _verdicts(filled: FilledTable) -> list[str]:
    is_proposed = {f"{filled.layout.paper}'s own method": True, "all others": False}
    level_texts = [
        f"{who}: {verdict_counts}"
        for who, proposed in is_proposed.items()
        if (verdict_counts := _counts(filled.verdicts(proposed), WORDS))
    ]
    latest_version = versions()[-1]
    notes = (
        [
            f"levels by version {latest_version.version} of the margins ({latest_version.fixed}), {'; '.join(level_texts)}."
        ]
        if level_texts
        else []
    )
    for counted, remark in ((True, ""), (False, ", not counted since full does not agree")):
        drops = Counter(one.drop.word for one in filled.cells if one.drop is not None and one.counted == counted)
        notes += [f"drops to full{remark}: {_counts(drops, [*drops])}."] if drops else []
    if any(not lead.why for lead in filled.leads):
        lead_text = _counts(Counter(lead.word for lead in filled.leads), (CONFIRMED, CONTRADICTED, UNDECIDED))
        notes.append(f"leads over the strongest printed baseline ({len(filled.leads)}): {lead_text}.")
    return notes


def _layers(filled: FilledTable) -> list[str]:
    notes = []
    for one in filled.cells:
        for curve in one.measured.curves:
            if len(curve.layers) > 1:
                name = " ".join(filter(None, (*filled.layout.labels(one.cell).values(), curve.label)))
                notes.append(f"by layer, {name}: {' '.join(f'{value:.3g}' for value in curve.layers)}.")
    versions_made_with = dict.fromkeys(one.measured.made for one in filled.cells if one.measured.made)
    return [*notes, f"diagnostics made with {'; '.join(versions_made_with)}."] if versions_made_with else notes


def _record(filled: FilledTable, one: FilledCell) -> dict[str, Any]:
    address, ours, printed, cell_tolerance = one.cell.address, one.measured, one.printed, one.tolerance
    tolerance = (
        [""] * 4
        if cell_tolerance is None
        else [*map(_six, (cell_tolerance.margin, cell_tolerance.half, cell_tolerance.step)), cell_tolerance.rival]
    )
    return {
        "table": filled.layout.id,
        **filled.layout.labels(one.cell),
        **{name: getattr(address, name) for name in ("model", "dataset", "metric")},
        "method": str(address.method),
        "minus": str(address.minus or ""),
        "reading": "" if address.method.base == "full" else address.reading,
        **{name: getattr(address, name) for name in ("protocol", "budget_kind", "budget")},
        "state": ours.state,
        "why": ours.why,
        **{name: _six(getattr(ours, name)) for name in ("value", "low", "high")},
        "n": ours.n or "",
        "of": ours.of or "",
        "printed": number_text(printed) if printed else "",
        **{name: getattr(printed, name) if printed else "" for name in ("unit", "status", "reason", "line")},
        "difference": "" if one.number_pair is None else _six(one.number_pair[0] - one.number_pair[1]),
        "verdict": one.verdict.word if one.verdict else "",
        **dict(zip(("margin", "half_digit", "one_answer", "rival"), tolerance, strict=True)),
        "readings": "; ".join(_reading(one, name) for name in one.readings if one.readings[name].value is not None),
        "ratio": _six(one.ratio[0]) if one.ratio else "",
        "ratio_printed": _six(one.ratio[1]) if one.ratio else "",
        "drop": one.drop.word if one.drop else "",
        "drop_counts": one.counted if one.drop else "",
        "other": "; ".join(ours.mismatches),
        "unstated": "; ".join(ours.unstated),
        "command": _command(filled, one),
        "source": "; ".join(_sources(filled, one)),
        "layers": "; ".join(f"{line.label} {' '.join(map(_six, line.layers))}".strip() for line in ours.curves),
    }


def _reading(one: FilledCell, name: str) -> str:
    reading = one.readings[name]
    reading_texts = (
        _number(one, reading, f"{name} ").text,
        str(one.words.get(name) or ""),
        "*" if reading.mismatches else "",
    )
    return " ".join(filter(None, reading_texts))


def _six(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"

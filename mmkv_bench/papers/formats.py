"""FilledCell tables as text: markdown, LaTeX, CSV and HTML. No cell is ever blank."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv_bench.papers.cells import caption, edges, grid, number, readings, words
from mmkv_bench.papers.commands import commands, experiment
from mmkv_bench.papers.filled_table import FilledCell, FilledTable
from mmkv_bench.papers.fixed import versions
from mmkv_bench.papers.metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE
from mmkv_bench.papers.reader import MEASURED, NOT_RUN, PART, PLANNED, STATES, UNCLEAR, Measurement
from mmkv_bench.papers.sources import behind, command_of, rows_of
from mmkv_bench.papers.verdict import CONFIRMED, CONTRADICTED, UNDECIDED, WORDS
from mmkv_bench.tables.formats import inert, write
from mmkv_bench.tables.table import Cell, Grid, Note, Table

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = {"md": "md", "latex": "tex", "csv": "csv", "html": "html"}
"""Format -> how its files end."""
CSV = (
    *(
        "table",
        "block",
        "row",
        "column",
        "across",
        "model",
        "dataset",
        "metric",
        "method",
        "minus",
        "reading",
        "protocol",
    ),
    *(
        "budget_kind",
        "budget",
        "state",
        "why",
        "value",
        "low",
        "high",
        "n",
        "of",
        "printed",
        "unit",
        "status",
        "reason",
    ),
    *("line", "difference", "verdict", "margin", "half_digit", "one_answer", "rival", "readings"),
    *("ratio", "ratio_printed", "drop", "drop_counts", "other", "unstated", "command", "source", "layers"),
)
_SOURCES = (
    "each cell's rows (`mmkv-bench show <source>`) or the command that makes them: `mmkv-bench papers {} --format csv`, columns "
    "source and command; --format html has them behind the cell."
)
_PRINTED = "printed numbers: results/reference/{}.csv, whose column line is that of the paper's text."
_MANY = 6


def render(pages: Sequence[FilledTable], form: str) -> str:
    """Tables in a format of SUFFIXES."""
    if form == "csv":
        return _csv(pages)
    return write([_table(page) for page in pages], form, title="Tables of the papers", notes=True)


def frame(pages: Sequence[FilledTable]) -> pd.DataFrame:
    """The lines of the format csv: one row per cell, numbers as numbers."""
    import pandas as pd

    return pd.read_csv(io.StringIO(_csv(pages)))


def notes(page: FilledTable) -> list[str]:
    """What stands below a table."""
    states = page.states
    told = [f"{state} {states[state]}" for state in STATES if states[state]]
    found = [_stands_in(page)] if page.spec.stands_for else []
    found += [f"{', '.join(told)}, of {len(page.cells)} cells."]
    found += _commands(page)
    found += [f"{state}: {why}." for state in (UNCLEAR, "cannot run") for why in _whys(page, state)]
    found += _verdicts(page) + _leads(page) + _layers(page)
    statuses = Counter((one.printed.status, one.printed.reason) for one in page.cells if one.printed)
    for (status, reason), count in sorted(statuses.items(), key=lambda pair: -pair[1]):
        if status != COMPARABLE or reason:
            found.append(f"{status} ({count}): {reason}." if reason else f"{status} ({count}).")
    mixed = [f"{name} {', '.join(values)}" for name, values in page.versions.items()]
    found += [f"made with {'; '.join(mixed)}."] if states[MEASURED] and mixed else []
    found += [_SOURCES.format(page.spec.id)]
    found += [_PRINTED.format(page.spec.id)] if any(one.printed for one in page.cells) else []
    if any(one.measured.other for one in page.cells):
        others = dict.fromkeys(word for one in page.cells for word in one.measured.other)
        found.append(f"* under other conditions, shown and not judged: {'; '.join(others)}.")
    unstated = dict.fromkeys(word for one in page.cells for word in one.measured.unstated)
    found += (
        [f"† stated by no paper and by no file of conf, or told by the answers: {'; '.join(unstated)}."]
        if unstated
        else []
    )
    passed = dict.fromkeys(one.measured.passed for one in page.cells if one.measured.passed)
    found += [f"of several runs the fullest counts, then the newest: {'; '.join(passed)}."] if passed else []
    if page.refused and not page.spec.stands_for:
        found.append(
            f"{page.refused} cells of random weights, of the embedded model or of fixture data are no evidence here."
        )
    return found + [f"{note}." for note in page.spec.notes]


def _stands_in(page: FilledTable) -> str:
    """What stands first below a stand-in."""
    counts = sorted({one.measured.n for one in page.cells if one.measured.n})
    size = "" if not counts else f" n = {' or '.join(f'{n:,}' for n in counts)}."
    stores = ", ".join(f"results/tiny/{store}" for store in page.spec.stores)
    return (
        f"a stand-in: the embedded model on its own prompts, in the layout of {', '.join(page.spec.stands_for)}. It shows that "
        f"this layout can be filled; it says nothing of these tables, nor of any method on another model.{size} Rows: {stores}."
    )


def _commands(page: FilledTable) -> list[str]:
    lacking = [one for one in page.cells if one.measured.state in (NOT_RUN, PART, PLANNED)]
    if not lacking:
        return []
    runs = page.spec.experiments
    apart = [part for one in lacking for part in one.cell.needed if not runs or not has_numbers(part.metric)]
    lines = [f"`{experiment(name)}`" for name in runs]
    every = [f"`{line}`" for line in commands(apart)]
    lines += every[:_MANY]
    lines += [f"and {len(every) - _MANY} more (--format csv lists them)"] if len(every) > _MANY else []
    return [f"not run: {', '.join(lines)}."] if lines else []


def _whys(page: FilledTable, state: str) -> list[str]:
    found = Counter(one.measured.why for one in page.cells if one.measured.state == state)
    return [f"{why} ({count})" for why, count in found.items()]


def _verdicts(page: FilledTable) -> list[str]:
    found = []
    for of_paper, who in ((True, f"{page.spec.paper}'s own method"), (False, "all others")):
        words = page.verdicts(of_paper)
        told = [f"{words[word]} {word}" for word in WORDS if words[word]]
        found += [f"levels, {who}: {', '.join(told)}."] if told else []
    if found:
        now = versions()[-1]
        found.append(f"a level is judged as the table reads it, by version {now.version} of the margins ({now.fixed}).")
    drops = [one for one in page.cells if one.drop is not None]
    for counted, what in (
        (True, "drops to full"),
        (False, "drops to full, printed and not counted since full does not agree"),
    ):
        told_of = Counter(one.drop.word for one in drops if one.drop is not None and one.counted == counted)
        found += [f"{what}: {', '.join(f'{count} {word}' for word, count in told_of.items())}."] if told_of else []
    return found


def _leads(page: FilledTable) -> list[str]:
    if not page.leads or not any(one.ours for one in page.leads):
        return []
    words = Counter(one.verdict.word for one in page.leads)
    told = ", ".join(f"{words[word]} {word}" for word in (CONFIRMED, CONTRADICTED, UNDECIDED) if words[word])
    found = [f"leads over the strongest printed baseline ({len(page.leads)}): {told}."]
    same, other = page.pairs
    if same + other:
        found.append(
            f"other pairs that our intervals tell apart: {same} with the printed sign, {other} with the other one."
        )
    return found


def _layers(page: FilledTable) -> list[str]:
    """The layers of diagnostics, a line for each line of the figure, and what they were made with."""
    found = []
    for one in page.cells:
        for curve in one.measured.curves:
            if len(curve.layers) > 1:
                name = " ".join(filter(None, (*edges(page, one), curve.label)))
                found.append(f"by layer, {name}: {' '.join(f'{value:.3g}' for value in curve.layers)}.")
    made = dict.fromkeys(one.measured.made for one in page.cells if one.measured.made)
    return [*found, f"diagnostics made with {'; '.join(made)}."] if made else found


def _table(page: FilledTable) -> Table:
    grids = [
        Grid(header, [[row, *(_place(page, cells) for cells in places)] for row, places in rows], label)
        for label, header, rows in grid(page)
    ]
    return Table(caption(page), "", grids, [Note(text) for text in notes(page)], name=page.spec.id)


def _place(page: FilledTable, cells: Sequence[FilledCell]) -> Cell:
    return Cell(words(cells), details=tuple(line for one in cells for line in behind(page, one)))


def _csv(pages: Sequence[FilledTable]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV, lineterminator="\n")
    writer.writeheader()
    for page in pages:
        for one in page.cells:
            writer.writerow(_line(page, one))
    return out.getvalue()


def _line(page: FilledTable, one: FilledCell) -> dict[str, object]:
    spec, at, own = page.spec, one.cell.address, one.measured
    printed = one.printed
    shown = one.shown
    return {
        "table": spec.id,
        **dict(zip(("block", "row", "column", "across"), edges(page, one), strict=True)),
        "model": at.model,
        "dataset": at.dataset,
        "metric": at.metric,
        "method": at.method,
        "minus": at.minus or "",
        "reading": "" if at.method.base == "full" else at.reading,
        "protocol": at.protocol,
        "budget_kind": at.budget_kind,
        "budget": at.budget,
        **_numbers(own),
        "printed": number(printed) if printed else "",
        "unit": printed.unit if printed else "",
        "status": printed.status if printed else "",
        "reason": printed.reason if printed else "",
        "line": printed.line if printed else "",
        "difference": "" if shown is None else f"{shown[0] - shown[1]:.6g}",
        "verdict": str(one.verdict.word) if one.verdict else "",
        **_held(one),
        "readings": "; ".join(readings(one)),
        **dict(zip(("ratio", "ratio_printed"), (f"{value:.6g}" for value in one.ratio or ()), strict=False)),
        "other": inert("; ".join(own.other)),
        "unstated": inert("; ".join(own.unstated)),
        "drop": one.drop.word if one.drop else "",
        "drop_counts": one.counted if one.drop else "",
        "command": command_of(spec, one),
        "source": inert("; ".join(rows_of(page, one))),
        "layers": inert("; ".join(f"{c.label} {' '.join(f'{v:.6g}' for v in c.layers)}".strip() for c in own.curves)),
    }


def _held(one: FilledCell) -> dict[str, str]:
    """What a cell is judged by, in the printed unit or on the log scale."""
    if one.limits is None:
        return dict.fromkeys(("margin", "half_digit", "one_answer", "rival"), "")
    numbers = (one.limits.margin, one.limits.half, one.limits.step)
    texts = (f"{number:.6g}" for number in numbers)
    return dict(zip(("margin", "half_digit", "one_answer"), texts, strict=True)) | {"rival": one.limits.rival}


def _numbers(own: Measurement) -> dict[str, object]:
    texts = {name: "" if value is None else f"{value:.6g}" for name, value in
             (("value", own.value), ("low", own.low), ("high", own.high))}  # fmt: skip
    return {"state": own.state, "why": inert(own.why), **texts, "n": own.n or "", "of": own.of or ""}

"""Filled tables as text: markdown, LaTeX, CSV and HTML. No cell is ever blank."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import TYPE_CHECKING

from mmkv_bench.papers.commands import command, commands, experiment
from mmkv_bench.papers.curves import Curve
from mmkv_bench.papers.fill import Filled, Page
from mmkv_bench.papers.measured import MEASURED, NOT_RUN, PART, STATES, UNCLEAR, Measured
from mmkv_bench.papers.measures import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, Printed
from mmkv_bench.papers.spec import Cell, Spec
from mmkv_bench.papers.verdict import AGREES, CONFIRMED, CONTRADICTED, DIFFERS, UNDECIDED
from mmkv_bench.tables.html_page import page as html_page
from mmkv_bench.tables.latex import escape, stacked
from mmkv_bench.tables.sections import Block, Grid, Label, Notes, Section, as_markdown

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
    *("line", "difference", "verdict", "needed", "drop", "drop_counts", "command", "source", "layers"),
)
_SOURCES = (
    "rows of each cell: `mmkv-bench papers {} --format csv`, column source; `mmkv-bench show <source>` shows them."
)
_MANY = 6
_FITTED = r"\ifdim\wd0>\linewidth \resizebox{\linewidth}{!}{\box0}\else\leavevmode\box0\fi"
_EQUAL = 1e-9  # ends of an interval that are no further apart say nothing of digits


def render(pages: Sequence[Page], form: str) -> str:
    """Tables in a format of SUFFIXES."""
    if form == "csv":
        return _csv(pages)
    if form == "html":
        return html_page("Tables of the papers", [_section(page) for page in pages])
    if form == "latex":
        return "% needs booktabs and graphicx\n" + stacked([_latex(page) for page in pages])
    return as_markdown([_section(page) for page in pages])


def frame(pages: Sequence[Page]) -> pd.DataFrame:
    """The lines of the format csv: one row per cell, numbers as numbers."""
    import pandas as pd

    return pd.read_csv(io.StringIO(_csv(pages)))


def text(one: Filled) -> str:
    """A cell: measured [interval] / printed, difference, verdict; or its state beside what is printed."""
    printed = "" if one.printed is None else f" / {number(one.printed)}"
    own = one.measured
    if own.value is None:
        why = f" ({own.why})" if own.why and own.state != UNCLEAR else ""
        return f"{own.state}{why}{printed}"
    places = _places(one.printed, own)
    lines = [_with_interval(curve, _places(one.printed, curve), curve.label) for curve in own.curves]
    told = ("; ".join(lines) or _with_interval(own, places)) + printed
    if own.state != MEASURED:
        told = f"{own.state} ({own.why}): {told}"
    if one.shown:
        told += f" {one.shown[0] - one.shown[1]:+.{places}f}"
    if one.verdict is not None:
        told += f" {one.verdict}"
    return told + (" *" if own.other else "")


def _with_interval(own: Measured | Curve, places: int, label: str = "") -> str:
    """A number behind its label, with its interval where it has one."""
    words = [*([label] if label else []), f"{own.value:.{places}f}"]
    if own.low is not None and own.high is not None:
        words.append(f"[{own.low:.{places}f}, {own.high:.{places}f}]")
    return " ".join(words)


def number(printed: Printed) -> str:
    """A printed value as it is shown: the literal, or the number where a scan has lost its point."""
    if not printed.value:
        return "unreadable"
    if printed.number is None or "." in printed.value:
        return printed.value
    return f"{printed.number:.{_digits(printed.half)}f}"


def notes(page: Page) -> list[str]:
    """What stands below a table."""
    states = page.states
    told = [f"{state} {states[state]}" for state in STATES if states[state]]
    found = [_stands_in(page)] if page.spec.stands_for else []
    found += [f"{', '.join(told)}, of {len(page.cells)} cells."]
    found += _commands(page)
    found += [f"{state}: {why}." for state in (UNCLEAR, "cannot run") for why in _whys(page, state)]
    found += _verdicts(page) + _leads(page) + _readings(page) + _layers(page)
    statuses = Counter((one.printed.status, one.printed.reason) for one in page.cells if one.printed)
    for (status, reason), count in sorted(statuses.items(), key=lambda pair: -pair[1]):
        if status != COMPARABLE or reason:
            found.append(f"{status} ({count}): {reason}." if reason else f"{status} ({count}).")
    mixed = [f"{name} {', '.join(values)}" for name, values in page.versions.items()]
    found += [f"made with {'; '.join(mixed)}."] if states[MEASURED] and mixed else []
    found += [_SOURCES.format(page.spec.id)] if states[MEASURED] and page.sources else []
    if any(one.measured.other for one in page.cells):
        others = dict.fromkeys(word for one in page.cells for word in one.measured.other)
        found.append(f"* under other conditions, shown and not judged: {'; '.join(others)}.")
    if page.refused and not page.spec.stands_for:
        found.append(
            f"{page.refused} cells of random weights, of the embedded model or of fixture data are no evidence here."
        )
    return found + [f"{note}." for note in page.spec.notes]


def _stands_in(page: Page) -> str:
    """What stands first below a stand-in."""
    counts = sorted({one.measured.n for one in page.cells if one.measured.n})
    size = "" if not counts else f" n = {' or '.join(f'{n:,}' for n in counts)}."
    stores = ", ".join(f"results/tiny/{store}" for store in page.spec.stores)
    return (
        f"a stand-in: the embedded model on its own prompts, in the layout of {', '.join(page.spec.stands_for)}. It shows that "
        f"this layout can be filled; it says nothing of these tables, nor of any method on another model.{size} Rows: {stores}."
    )


def _commands(page: Page) -> list[str]:
    lacking = [one for one in page.cells if one.measured.state in (NOT_RUN, PART)]
    if not lacking:
        return []
    runs = page.spec.experiments
    apart = [part for one in lacking for part in one.cell.needed if not runs or not has_numbers(part.metric)]
    lines = [f"`{experiment(name)}`" for name in runs]
    every = [f"`{line}`" for line in commands(apart)]
    lines += every[:_MANY]
    lines += [f"and {len(every) - _MANY} more (--format csv lists them)"] if len(every) > _MANY else []
    return [f"not run: {', '.join(lines)}."] if lines else []


def _whys(page: Page, state: str) -> list[str]:
    found = Counter(one.measured.why for one in page.cells if one.measured.state == state)
    return [f"{why} ({count})" for why, count in found.items()]


def _verdicts(page: Page) -> list[str]:
    found = []
    for of_paper, who in ((True, f"{page.spec.paper}'s own method"), (False, "all others")):
        words = page.verdicts(of_paper)
        told = [f"{words[word]} {word}" for word in (AGREES, DIFFERS, UNDECIDED) if words[word]]
        found += [f"levels, {who}: {', '.join(told)}."] if told else []
    drops = [one for one in page.cells if one.drop is not None]
    for counted, what in (
        (True, "drops to full"),
        (False, "drops to full, printed and not counted since full does not agree"),
    ):
        told_of = Counter(one.drop.word for one in drops if one.drop is not None and one.counted == counted)
        found += [f"{what}: {', '.join(f'{count} {word}' for word, count in told_of.items())}."] if told_of else []
    return found


def _leads(page: Page) -> list[str]:
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


def _readings(page: Page) -> list[str]:
    found = []
    for one in page.cells:
        values = {name: made.value for name, made in one.readings.items() if made.value is not None}
        if values and one.measured.value is not None:
            every = [one.measured.value, *values.values()]
            found.append(f"{one.cell.address}: {min(every):.4g} to {max(every):.4g} over {len(every)} readings")
    if not found:
        return []
    return [
        f"declared readings, none of them picked: {'; '.join(found[:_MANY])}{' ...' if len(found) > _MANY else ''}."
    ]


def _layers(page: Page) -> list[str]:
    """The layers of diagnostics, a line for each line of the figure, and what they were made with."""
    found = []
    for one in page.cells:
        for curve in one.measured.curves:
            if len(curve.layers) > 1:
                name = " ".join(filter(None, (*_edges(page, one), curve.label)))
                found.append(f"by layer, {name}: {' '.join(f'{value:.3g}' for value in curve.layers)}.")
    made = dict.fromkeys(one.measured.made for one in page.cells if one.measured.made)
    return [*found, f"diagnostics made with {'; '.join(made)}."] if made else found


def _edges(page: Page, one: Filled) -> tuple[str, ...]:
    """What stands at a cell's edges."""
    spec, cell = page.spec, one.cell
    across = "" if cell.across is None else spec.across[cell.across].label
    return spec.blocks[cell.block].label, spec.rows[cell.row].label, spec.columns[cell.column].label, across


def _grid(page: Page) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(block's label, header, rows) of each block."""
    spec = page.spec
    spans = len(spec.across) > 1
    for b, block in enumerate(spec.blocks):
        own = {(one.cell.row, one.cell.column, one.cell.across): one for one in page.cells if one.cell.block == b}
        if not own:
            continue
        sides = [(c, a) for c in range(len(spec.columns)) for a in range(len(spec.across))]
        alone = {c for c in range(len(spec.columns)) if {key[2] for key in own if key[1] == c} == {None}}
        sides = [
            (c, a)
            for c, a in sides
            if any((r, c, side) in own for r in range(len(spec.rows)) for side in (a, None))
            and (c not in alone or not a)
        ]
        if spec.together:
            heads = [across.label for across in spec.across]
            rows = [
                [
                    row.label,
                    *(" ; ".join(_at(own, r, c, a) for c in range(len(spec.columns))) for a in range(len(spec.across))),
                ]
                for r, row in enumerate(spec.rows)
                if any(key[0] == r for key in own)
            ]
            yield block.label, [" ; ".join(column.label for column in spec.columns), *heads], rows
            continue
        heads = [
            f"{spec.columns[c].label} {spec.across[a].label}".strip()
            if spans and c not in alone
            else spec.columns[c].label
            for c, a in sides
        ]
        rows = [
            [row.label, *(_at(own, r, c, a) for c, a in sides)]
            for r, row in enumerate(spec.rows)
            if any(key[0] == r for key in own)
        ]
        yield block.label, ["", *heads], rows


def _at(own: dict[tuple[int, int, int | None], Filled], row: int, column: int, across: int) -> str:
    one = own.get((row, column, across)) or own.get((row, column, None))
    return "no such cell" if one is None else text(one)


def _caption(page: Page) -> str:
    said = "measured [95%]" if page.spec.stands_for else "measured [95%] / printed, difference, verdict"
    return f"{page.spec.title} ({page.spec.id}): {page.spec.caption}; {said}"


def _section(page: Page) -> Section:
    blocks: list[Block] = []
    for label, header, rows in _grid(page):
        blocks += [Label(label)] if label else []
        blocks.append(Grid(header, rows))
    return Section(_caption(page), "", (*blocks, Notes(notes(page))), name=page.spec.id)


def _latex(page: Page) -> str:
    lines = [r"\begin{table}", r"\centering\tiny", rf"\caption{{{escape(_caption(page))}}}"]
    lines.append(rf"\label{{tab:{page.spec.id.replace('_', '-').replace('.', '-')}}}")
    for label, header, rows in _grid(page):
        lines += [rf"\par\smallskip {escape(label)}\par"] if label else []
        lines += [r"\setbox0=\hbox{%", rf"\begin{{tabular}}{{l{'l' * (len(header) - 1)}}}", r"\toprule"]
        lines += [" & ".join(map(escape, header)) + r" \\", r"\midrule"]
        lines += [" & ".join(map(escape, row)) + r" \\" for row in rows]
        lines += [r"\bottomrule", r"\end{tabular}}%", _FITTED]
    lines.append(r"\par\smallskip\raggedright " + r" \\ ".join(escape(note) for note in notes(page)))
    return "\n".join([*lines, r"\end{table}", ""])


def _csv(pages: Sequence[Page]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV, lineterminator="\n")
    writer.writeheader()
    for page in pages:
        for one in page.cells:
            writer.writerow(_line(page, one))
    return out.getvalue()


def _line(page: Page, one: Filled) -> dict[str, object]:
    cell, spec, at, own = one.cell, page.spec, one.cell.address, one.measured
    printed = one.printed
    shown = one.shown
    run = own.state in (NOT_RUN, PART)
    return {
        "table": spec.id,
        **dict(zip(("block", "row", "column", "across"), _edges(page, one), strict=True)),
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
        "needed": (one.verdict.needed or "") if one.verdict else "",
        "drop": one.drop.word if one.drop else "",
        "drop_counts": one.counted if one.drop else "",
        "command": _command(spec, cell) if run else "",
        "source": "; ".join(page.sources[row] for row in own.rows) or own.source,
        "layers": "; ".join(f"{c.label} {' '.join(f'{v:.6g}' for v in c.layers)}".strip() for c in own.curves),
    }


def _command(spec: Spec, cell: Cell) -> str:
    return "; ".join(dict.fromkeys(filter(None, (command(one, spec.experiments) for one in cell.needed))))


def _numbers(own: Measured) -> dict[str, object]:
    texts = {name: "" if value is None else f"{value:.6g}" for name, value in
             (("value", own.value), ("low", own.low), ("high", own.high))}  # fmt: skip
    return {"state": own.state, "why": own.why, **texts, "n": own.n or "", "of": own.of or ""}


def _digits(half: float) -> int:
    return max(0, -floor(log10(2 * half) + 1e-9)) if half else 0


def _places(printed: Printed | None, own: Measured | Curve) -> int:
    """Decimals: the printed number's, else two digits of the interval's width, else four digits of the value."""
    if printed is not None and printed.number is not None:
        return _digits(printed.half)
    if own.low is not None and own.high is not None and own.high - own.low > _EQUAL:
        return max(0, 1 - floor(log10(own.high - own.low)))
    return max(0, 3 - floor(log10(abs(own.value)))) if own.value else 3

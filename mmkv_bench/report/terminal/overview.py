"""A store in a terminal: a line per cell, by dataset, model and protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmkv_bench.report.terminal.known import Cells
from mmkv_bench.report.terminal.text import plain, table
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.index import remembered
from mmkv_bench.store.tally import tally
from mmkv_bench.tables.number_text import score, span

if TYPE_CHECKING:
    from rich.console import Console

MOST = 200
"""Cells that are listed; words choose among more."""
_METRIC = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "low", "high")

Metrics = dict[str, dict[str, Mapping[str, Any]]]


def show(console: Console, cells: Cells, chosen: Sequence[str]) -> None:
    """Print the cells of a store: score, interval, how the answers ended."""
    ended, scores = _ended(cells), metrics(cells)
    rows = sum(sum(one.values()) for one in ended.values())
    console.print(f"{cells.store.root}: {len(cells.rows):,} cells, {rows:,} answers")
    for (dataset, model, protocol), group in groupby(chosen[:MOST], lambda cell: _place(cells.rows[cell])):
        own = list(group)
        metric = headline(cells, own, scores)
        console.print(f"\n{dataset}, {model}, protocol={protocol}", style="bold")
        header = ["cell", "method", "n", metric or "score", "95% interval", "answers"]
        lines = [_line(cells, cell, scores.get(cell, {}).get(metric), ended.get(cell, {})) for cell in own]
        table(console, header, lines, right=("n", metric or "score"))
    if len(chosen) > MOST:
        console.print(f"\n{len(chosen) - MOST:,} more cells: choose by words, as method@budget or several of these")
        for what in ("dataset", "model", "protocol", "reading", "method"):
            names = dict.fromkeys(cells.rows[cell][what] for cell in chosen)
            console.print(plain(f"{what}: {' '.join(sorted(filter(None, names)))}"))


def metrics(cells: Cells) -> Metrics:
    """Cell -> metric -> its row of `metrics`."""
    found: Metrics = {}
    for row in remembered(cells.store, "metrics", _METRIC).to_pylist():
        found.setdefault(row["cell"], {})[row["metric"]] = row
    return found


def headline(cells: Cells, own: Sequence[str], scores: Metrics) -> str:
    """The metric that cells of one dataset are shown by: the configuration's first, else the first that is the task's own."""
    known = {name for cell in own for name in scores.get(cell, {})}
    asked = [name for name in cells.metrics(own[0]) if name in known]
    return next(iter(asked or sorted(known - MEASURES) or sorted(known)), "")


def _line(cells: Cells, cell: str, metric: Mapping[str, Any] | None, ended: Mapping[str, int]) -> list[str]:
    protocol = cells.rows[cell]["protocol"]
    label = " ".join(word for word in cells.label(cell).split(" ") if word != protocol)
    told = ["", "-", ""] if metric is None else [str(metric["n"]), _value(metric), span(metric["low"], metric["high"])]
    return [cells.short(cell), label, *told, endings(ended)]


def _value(metric: Mapping[str, Any]) -> str:
    """A headline; where answers failed, in brackets what it is with failures as zero."""
    if metric["value"] is None and metric["value_failures_zero"] is not None:
        return f"({score(metric['value_failures_zero'])})"
    return score(metric["value"])


def endings(ended: Mapping[str, int]) -> str:
    """`500 ok`, `498 ok, 2 oom`."""
    return ", ".join(f"{n} {status}" for status, n in sorted(ended.items(), key=lambda one: one[0] != "ok")) or "none"


def _ended(cells: Cells) -> dict[str, dict[str, int]]:
    """Cell -> status -> answers that ended so."""
    counts = tally(cells.store).counts
    found: dict[str, dict[str, int]] = {}
    for cell, status, n in zip(*(counts[name].to_pylist() for name in ("cell", "status", "n")), strict=True):
        own = found.setdefault(cell, {})
        own[status] = own.get(status, 0) + n
    return found


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["dataset"], row["model"], row["protocol"]

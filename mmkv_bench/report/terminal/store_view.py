"""A store in a terminal, a line per cell; and one cell: its configuration, scores, audit, and the command that makes it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmkv_bench.report.answers import COLUMNS, AnswerTable
from mmkv_bench.report.cells import audit_sentences, endings, parsed
from mmkv_bench.report.command import Commands
from mmkv_bench.report.formats import number_words
from mmkv_bench.report.terminal.store_cells import StoreCells
from mmkv_bench.report.terminal.text import pairs, plain, table
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.tally import remembered, tally
from mmkv_bench.tables.number_text import score, signed, span

if TYPE_CHECKING:
    from rich.console import Console

MOST = 200
"""Cells that are listed; words choose among more."""
_METRIC = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "low", "high")

_CONFIGURATION = (
    *("model", "model_fingerprint", "weights", "model_revision", "dataset", "dataset_fingerprint", "method", "base"),
    *("reading", "protocol", "seed", "parameters", "allocation_scope", "dtype", "attention", "generation"),
    *("numerics_version", "method_version"),
)
_PROVENANCE = ("created_at", "git_commit", "git_dirty", "torch", "transformers", "device", "driver", "cpu", "versions")

Metrics = dict[str, dict[str, Mapping[str, Any]]]


def show_store(console: Console, cells: StoreCells, chosen: Sequence[str]) -> None:
    """Print the cells of a store: score, interval, how the answers ended."""
    ended, scores = _ended(cells), _metrics(cells)
    rows = sum(sum(one.values()) for one in ended.values())
    console.print(f"{cells.store.root}: {len(cells.rows):,} cells, {rows:,} answers")
    for (dataset, model, protocol), group in groupby(chosen[:MOST], lambda cell: _place(cells.rows[cell])):
        members = list(group)
        metric = _headline(cells, members, scores)
        console.print(f"\n{dataset}, {model}, protocol={protocol}", style="bold")
        header = ["cell", "method", "n", metric or "score", "95% interval", "answers"]
        lines = [_line(cells, cell, scores.get(cell, {}).get(metric), ended.get(cell, {})) for cell in members]
        table(console, header, lines, right=("n", metric or "score"))
    if len(chosen) > MOST:
        console.print(f"\n{len(chosen) - MOST:,} more cells: choose by words, as method@budget or several of these")
        for what in ("dataset", "model", "protocol", "reading", "method"):
            names = dict.fromkeys(cells.rows[cell][what] for cell in chosen)
            console.print(plain(f"{what}: {' '.join(sorted(filter(None, names)))}"))


def _metrics(cells: StoreCells) -> Metrics:
    """Cell -> metric -> its row of `metrics`."""
    metrics: Metrics = {}
    for row in remembered(cells.store, "metrics", _METRIC).to_pylist():
        metrics.setdefault(row["cell"], {})[row["metric"]] = row
    return metrics


def _headline(cells: StoreCells, own: Sequence[str], scores: Metrics) -> str:
    """The metric that cells of one dataset are shown by: the configuration's first, else the first that is the task's own."""
    scored = {name for cell in own for name in scores.get(cell, {})}
    configured = [name for name in cells.metrics(own[0]) if name in scored]
    return next(iter(configured or sorted(scored - MEASURES) or sorted(scored)), "")


def _line(cells: StoreCells, cell: str, metric: Mapping[str, Any] | None, ended: Mapping[str, int]) -> list[str]:
    protocol = cells.rows[cell]["protocol"]
    label = " ".join(word for word in cells.label(cell).split(" ") if word != protocol)
    fields = (
        ["", "-", ""] if metric is None else [str(metric["n"]), _value(metric), span(metric["low"], metric["high"])]
    )
    return [cells.short(cell), label, *fields, endings(ended)]


def _value(metric: Mapping[str, Any]) -> str:
    """A headline; where answers failed, in brackets what it is with failures as zero."""
    if metric["value"] is None and metric["value_failures_zero"] is not None:
        return f"({score(metric['value_failures_zero'])})"
    return score(metric["value"])


def _ended(cells: StoreCells) -> dict[str, dict[str, int]]:
    """Cell -> status -> answers that ended so."""
    counts = tally(cells.store).counts
    counts_of: dict[str, dict[str, int]] = {}
    for cell, status, n in zip(*(counts[name].to_pylist() for name in ("cell", "status", "n")), strict=True):
        statuses = counts_of.setdefault(cell, {})
        statuses[status] = statuses.get(status, 0) + n
    return counts_of


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["dataset"], row["model"], row["protocol"]


def show_cell(console: Console, cells: StoreCells, cell: str) -> None:
    """Print a cell."""
    (row,) = cells.store.cells([cell]).to_pylist()
    console.print(f"{cells.label(cell)} on {row['dataset']}", style="bold")
    console.print(f"cell {cell}")
    _section(console, "Configuration")
    pairs(console, [(name, _value_words(row[name])) for name in _CONFIGURATION if row[name] is not None])
    _section(console, "Where it comes from")
    pairs(console, [(name, _value_words(row[name])) for name in _PROVENANCE if row[name] is not None])
    _scores(console, cells, cell)
    _audit(console, cells, cell)
    _section(console, "Again")
    command = Commands().of({key: value for key, value in row.items() if value is not None}, 0, parsed(row["config"]))
    if command["line"]:
        console.print(command["line"], soft_wrap=True)
    console.print(command["note"])


def _section(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _value_words(value: Any) -> str:
    """A value of a row; JSON as `key=value`."""
    text = value.isoformat(timespec="seconds") if hasattr(value, "isoformat") else str(value)
    if text[:1] == "{":
        held = json.loads(text)
        text = ", ".join(f"{key}={json.dumps(one)}" for key, one in held.items())
    return plain(text)


def _scores(console: Console, cells: StoreCells, cell: str) -> None:
    rows = cells.store.metrics([cell]).to_pylist()
    _section(console, "Scores")
    if not rows:
        console.print("none: its answers are not scored; mmkv-bench score makes up for that")
        return
    first = cells.metrics(cell)
    rows.sort(key=lambda row: (first.index(row["metric"]) if row["metric"] in first else len(first), row["metric"]))
    lines = []
    for row in rows:
        less = "" if row["difference"] is None else signed(row["difference"])
        gap = span(row["difference_low"], row["difference_high"])
        fields = [row["metric"], f"{row['n_ok']} of {row['n']}", score(row["value"]), span(row["low"], row["high"])]
        lines.append([*fields, " ".join(filter(None, (less, gap)))])
    table(console, ["metric", "ok", "value", "95% interval", "minus full"], lines, right=("ok", "value"))


def _audit(console: Console, cells: StoreCells, cell: str) -> None:
    """Print how the answers ended and what they kept, all of them, and by layer and KV head."""
    account = AnswerTable.of(cells.store.responses([cell], COLUMNS, coded=True)).account(cell)
    _section(console, "Answers")
    for sentence in audit_sentences(account["counted"]):
        console.print(sentence)
    if account["kept"]:
        _heads(console, account["kept"])


def _heads(console: Console, kept: Sequence[Sequence[Sequence[float]]]) -> None:
    """Entries by layer and KV head; heads that do not fit into the width are told by their least and most."""
    mean, least, most = kept
    heads = len(mean[0])
    console.print("\nentries kept by layer and KV head, mean over answers (least to most where they differ):")
    if heads * 8 + 8 > console.width:
        lines = [
            [
                str(layer),
                number_words(sum(row) / heads),
                number_words(min(least[layer])),
                number_words(max(most[layer])),
            ]
            for layer, row in enumerate(mean)
        ]
        header = ["layer", f"mean of {heads} heads", "least", "most"]
    else:
        header = ["layer", *(f"head {head}" for head in range(heads))]
        lines = [
            [str(layer), *(_spread(row[head], least[layer][head], most[layer][head]) for head in range(heads))]
            for layer, row in enumerate(mean)
        ]
    table(console, header, lines, right=header)


def _spread(mean: float, least: float, most: float) -> str:
    return number_words(mean) if least == most else f"{number_words(mean)} ({number_words(least)}-{number_words(most)})"

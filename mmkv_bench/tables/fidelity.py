"""Fidelity to `full` in one table per context: how far distributions are, and how far answers go along with full's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.tables.build import build
from mmkv_bench.tables.captions import caption, line_label
from mmkv_bench.tables.notes import fidelity_notes
from mmkv_bench.tables.rows import Rows
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.table import Grid, Table

GROUP = "fidelity"
"""Name for all of these metrics on a command line."""

COLUMNS = {
    "fidelity_kl": "KL [nats, <= 5]",
    "fidelity_kl_first": "KL token 1 [<= 5]",
    "fidelity_top1": "top-1",
    "divergence": "tokens in common",
    "same_answer": "same answer",
}


def among(metrics: Sequence[str]) -> set[str]:
    """The metrics of fidelity that a list asks for."""
    return set(FIDELITY) if GROUP in metrics else set(FIDELITY).intersection(metrics)


def names(metrics: Sequence[str] | None, rows: Rows) -> list[str] | None:
    """A list of metrics in which `fidelity` stands for those of its metrics that the rows hold."""
    held = [name for name in FIDELITY if name in rows.names]
    return (
        None
        if metrics is None
        else [name for metric in metrics for name in (held if held and metric == GROUP else [metric])]
    )


def fidelity_tables(
    rows: Rows,
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
) -> list[Table]:
    """One table per dataset, protocol and kind of budget: a line per method and budget, a column per metric.

    Raises ConfigError when no answer of the rows was held against full's.
    """
    found = [name for name in COLUMNS if name in rows.names]
    if not found:
        raise ConfigError(
            "These rows hold no fidelity: they were made with fidelity=off, with sharing=off, without `full`, or before it "
            "was measured. Run them again in another folder (out=<folder>) for it."
        )
    tables = build(rows, datasets=datasets, protocols=protocols, readings=readings, metrics=found)
    groups: dict[tuple[str, ...], dict[str, ScoreTable]] = {}
    for table in tables:
        groups.setdefault((*table.context.values(), table.axis), {})[table.metric] = table
    return [_table(group, tables) for group in groups.values()]


def _table(group: Mapping[str, ScoreTable], tables: Sequence[ScoreTable]) -> Table:
    shown = [metric for metric in COLUMNS if metric in group]
    first = group[shown[0]]
    lines = {
        (method.label, budget): method for t in group.values() for method in t.methods for budget in ("", *t.budgets)
    }
    rows = [
        [line_label(method), budget or "all", *(_cell(group[metric], label, budget) for metric in shown)]
        for (label, budget), method in lines.items()
        if any((label, budget) in table.entries for table in group.values())
    ]
    grid = Grid(["method", "budget", *(COLUMNS[metric] for metric in shown)], rows, labels=2)
    words = caption(first, tables, intervals=False)
    return Table(f"{first.dataset}, {GROUP}", words, [grid], fidelity_notes(first, [*group]))


def _cell(table: ScoreTable, label: str, budget: str) -> str:
    entry = table.entries.get((label, budget))
    if entry is None:
        return ""
    if entry.value is None:
        return f"{entry.scores.n_ok}/{entry.scores.n} measured"
    if table.metric.startswith("fidelity_kl"):
        return f"{entry.value:.2g}" if entry.value else "0"
    return f"{entry.value:.1f}" if table.metric == "divergence" else f"{entry.value:.3f}"

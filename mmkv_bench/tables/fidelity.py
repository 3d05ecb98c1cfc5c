"""Fidelity to `full` in one table per context: how far distributions are, and how far answers go along with full's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmkv_bench.errors import ConfigError
from mmkv_bench.protocols import protocol
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.tables.build import build
from mmkv_bench.tables.notes import caption, line_label
from mmkv_bench.tables.rows import BASELINE, Rows
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.sections import Grid, Notes, Section

GROUP = "fidelity"
"""What stands for all of these metrics on a command line."""

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


def fidelity_sections(
    rows: Rows,
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
) -> list[Section]:
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
    return [_one(group, tables) for group in groups.values()]


def _one(group: Mapping[str, ScoreTable], tables: Sequence[ScoreTable]) -> Section:
    shown = [metric for metric in COLUMNS if metric in group]
    some = group[shown[0]]
    lines = {
        (method.label, budget): method for t in group.values() for method in t.methods for budget in ("", *t.budgets)
    }
    grid = [
        [line_label(method), budget or "all", *(_cell(group[metric], label, budget) for metric in shown)]
        for (label, budget), method in lines.items()
        if any((label, budget) in table.entries for table in group.values())
    ]
    budget = ["budget", *(COLUMNS[metric] for metric in shown)]
    body = (Grid(["method", *budget], grid), Notes(_notes(some, group)))
    return Section(f"{some.dataset}, {GROUP}", caption(some, tables, intervals=False), body)


def _cell(table: ScoreTable, label: str, budget: str) -> str:
    entry = table.entries.get((label, budget))
    if entry is None:
        return ""
    if entry.value is None:
        return f"{entry.scores.n_ok}/{entry.scores.n} measured"
    if table.metric.startswith("fidelity_kl"):
        return f"{entry.value:.2g}" if entry.value else "0"
    return f"{entry.value:.1f}" if table.metric == "divergence" else f"{entry.value:.3f}"


def _notes(table: ScoreTable, group: Mapping[str, ScoreTable]) -> list[str]:
    first = (
        "without token 1, which the full prefill gives to all"
        if protocol(table.context["protocol"]).from_prefill
        else "token 1 among them"
    )
    lines = [
        f"KL(full || method) and top-1 agreement per token of full's own answer, teacher-forced, mean over samples ({first}); a "
        "sample counts for 5 nats at most.",
        "tokens in common: of the method's own answer before it leaves full's; one that never does counts with its length.",
    ]
    if any(method.base == BASELINE for method in table.methods):
        lines.append(
            "full: measured a second time through the path of compressed caches, the noise floor of the others."
        )
    shown = ", ".join(f"--metric {metric}" for metric in group)
    return [*lines, f"intervals and pairs: {shown}."]

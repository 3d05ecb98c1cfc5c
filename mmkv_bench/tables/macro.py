"""Groups of datasets: the mean of their scores, each dataset counting once, as benchmarks of many sub-tasks print it.

A table has the methods of one model, protocol and budget as lines and the groups as columns. A number is there only where
every dataset of the group has a headline. Its interval is a bootstrap over the clusters of each dataset, drawn apart from
the other datasets' (stratified); the difference to `full` is paired within each dataset.

Groups are given from outside; those of MileBench are in evaluation/tasks/milebench/subtasks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmkv_bench.errors import StoreError
from mmkv_bench.tables.intervals import ALPHA, bootstrap_statistics, cluster_index, percentile_ends
from mmkv_bench.tables.render import aligned, score, signed, span
from mmkv_bench.tables.rows import BASELINE, CONTEXT, Scores, align
from mmkv_bench.tables.table import Table

OF_ONE_DATASET = ("dataset", "dataset_fingerprint", "generation")  # in which the datasets of a group may differ


@dataclass(frozen=True)
class Mean:
    """A mean over the datasets of a group, from 0 to 1, or a difference of two such.

    low, high: 95% interval; None where a dataset has one cluster only.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class GroupTable:
    """Means of the groups by (method label, group) at one budget ("" where no method has one).

    context    what the tables of the datasets have in common
    against    the same minus the mean of `full`; empty for `full` itself
    absent     group -> its datasets without a table, for the groups that have one and lack another
    """

    context: dict[str, str]
    axis: str
    budget: str
    groups: tuple[str, ...]
    methods: tuple[str, ...]
    means: dict[tuple[str, str], Mean]
    against: dict[tuple[str, str], Mean]
    absent: dict[str, tuple[str, ...]]


def group_tables(
    tables: Sequence[Table], groups: Mapping[str, Sequence[str]], metrics: Mapping[str, str]
) -> list[GroupTable]:
    """Tables by group, out of the datasets' tables (see `build`).

    Args:
        groups: group -> names of its datasets, in the order of the columns.
        metrics: dataset -> the metric that counts.

    Returns:
        One for each context, kind of budget and budget in which at least one group has a table of one of its datasets.

    Raises:
        StoreError: a dataset with two tables, of different data or settings.
    """
    members = {name for datasets in groups.values() for name in datasets}
    chosen = [t for t in tables if t.dataset in members and metrics.get(t.dataset) == t.metric]
    made = []
    for context in sorted({_context(table) for table in chosen}):
        alike = [table for table in chosen if _context(table) == context]
        for axis in sorted({table.axis for table in alike} - {"none"}) or ["none"]:
            of_axis = _by_dataset([table for table in alike if table.axis in (axis, "none")], axis)
            for budget in _budgets(of_axis.values()):
                made.append(_group_table(dict(context), axis, budget, of_axis, groups))
    return made


def _context(table: Table) -> tuple[tuple[str, str], ...]:
    return tuple((key, table.context[key]) for key in CONTEXT if key not in OF_ONE_DATASET)


def _by_dataset(tables: Sequence[Table], axis: str) -> dict[str, Table]:
    """Dataset -> its table of that kind of budget, or the one without budgets where it has no other."""
    found: dict[str, Table] = {}
    for table in sorted(tables, key=lambda table: table.axis == axis):
        other = found.get(table.dataset)
        if other is not None and other.axis == table.axis:
            keys = ", ".join(key for key in OF_ONE_DATASET if other.context[key] != table.context[key])
            raise StoreError(
                f"{table.dataset} has two tables that differ in {keys}, so a mean over datasets is not defined; keep such "
                "rows in folders of their own"
            )
        found[table.dataset] = table
    return found


def _budgets(tables: Sequence[Table]) -> list[str]:
    found = {budget for table in tables for budget in table.budgets}
    return sorted(found, key=float) or [""]


def _group_table(
    context: dict[str, str], axis: str, budget: str, tables: Mapping[str, Table], groups: Mapping[str, Sequence[str]]
) -> GroupTable:
    present = {code: [name for name in names if name in tables] for code, names in groups.items()}
    shown = tuple(code for code, names in present.items() if names)
    labels = dict.fromkeys(method.label for table in tables.values() for method in table.methods)
    means: dict[tuple[str, str], Mean] = {}
    against: dict[tuple[str, str], Mean] = {}
    for code in shown:
        names = groups[code]
        full = _scores(tables, names, BASELINE, budget)
        for label in labels:
            own = _scores(tables, names, label, budget)
            if own is None:
                continue
            means[label, code] = _mean({name: (s.values, s.clusters) for name, s in own.items()})
            if full is not None and label != BASELINE:
                against[label, code] = _mean({name: _difference(own[name], full[name]) for name in own})
    absent = {code: tuple(n for n in groups[code] if n not in tables) for code in shown}
    lines = tuple(label for label in labels if any((label, code) in means for code in shown))
    return GroupTable(context, axis, budget, shown, lines, means, against, {k: v for k, v in absent.items() if v})


def _scores(tables: Mapping[str, Table], names: Sequence[str], label: str, budget: str) -> dict[str, Scores] | None:
    """The method's scores on every dataset; None unless all of them have a headline."""
    found = {}
    for name in names:
        entry = tables[name].entry(label, budget) if name in tables else None
        if entry is None or entry.value is None:
            return None
        found[name] = entry.scores
    return found


def _difference(a: Scores, b: Scores) -> tuple[np.ndarray, np.ndarray]:
    of_a, of_b, clusters = align(a, b)
    return of_a - of_b, clusters


def _mean(parts: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Mean:
    """Of dataset -> (values of its samples, their clusters)."""
    value = float(np.mean([np.mean(values) for values, _ in parts.values()]))
    if any(cluster_index(clusters)[1] < 2 for _, clusters in parts.values()):
        return Mean(value, None, None)
    draws = np.mean([bootstrap_statistics(*part, name) for name, part in parts.items()], axis=0)
    return Mean(value, *percentile_ends(draws, ALPHA))


def group_markdown(tables: Sequence[GroupTable], *, intervals: bool = True) -> str:
    """The tables with their captions; below each, the differences to `full`."""
    return "\n".join(_markdown(table, intervals) for table in tables)


def _markdown(table: GroupTable, intervals: bool) -> str:
    budget = f", budget {table.budget}" if table.budget else ""
    title = f"**{table.context['model']}, protocol {table.context['protocol']}{budget}, means over datasets**"
    header = ["method", *table.groups]

    def grid(found: Mapping[tuple[str, str], Mean], number) -> list[list[str]]:
        lines = [label for label in table.methods if any((label, code) in found for code in table.groups)]
        return [
            [label, *(_cell(found.get((label, code)), number, intervals) for code in table.groups)] for label in lines
        ]

    blocks = [f"{title}: each dataset of a group counts once.", aligned(header, grid(table.means, score))]
    if table.against:
        blocks += ["Minus `full`, paired by sample:", aligned(header, grid(table.against, signed))]
    if table.absent:
        lacking = "; ".join(f"{code} lacks {', '.join(names)}" for code, names in table.absent.items())
        blocks.append(f"- Groups without a number are not complete: {lacking}.")
    return "\n\n".join(blocks) + "\n"


def _cell(mean: Mean | None, number, intervals: bool) -> str:
    if mean is None:
        return ""
    return " ".join(part for part in (number(mean.value), span(mean.low, mean.high) if intervals else "") if part)

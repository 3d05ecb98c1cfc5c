"""Tables over several datasets: mean scores over a benchmark's groups of datasets, and mean ranks over datasets.

`about.groups` of conf/dataset/<name>.yaml states the groups of a dataset: {benchmark: {group: number of datasets}}. The first
metric of a dataset counts, and each dataset counts once. A group has a number only if each of its datasets has a score.

A group's interval combines the datasets' intervals: the distance from the mean to an end is the root of the sum of the datasets'
squared distances, divided by their number (Zou and Donner, Statistics in Medicine 27, 2008).

Mean ranks take the datasets ("tasks") as fixed, not as a sample. On each of K tasks, methods are compared at level alpha / K. So
with 95 % confidence all rank intervals contain the true ranks, and intervals of mean ranks contain the true means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.statistics.intervals import ALPHA, LEVEL
from mmkv_bench.tables.comparable_cells import find_group, has_expected_score, verdict
from mmkv_bench.tables.compare import against
from mmkv_bench.tables.score_notes import FIXTURE_DATA, RANKS, gate_note
from mmkv_bench.tables.score_table import Entry, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE, CONTEXT, FIXTURE, Rows, config_of, dataset_node
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table
from mmkv_bench.tables.text import axis_words, context_words, interval_text, ranks_text, score, signed_score

OF_ONE_DATASET = ("dataset", "dataset_fingerprint", "generation")  # the datasets of a group may differ in these


@dataclass(frozen=True)
class DatasetGroup:
    """A group of a benchmark's datasets.

    metrics: dataset of the group that has rows -> the metric that counts. size: number of all datasets of the group.
    """

    benchmark: str
    name: str
    metrics: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Mean:
    """A score, a difference of two scores, or a mean of either. low, high: ends of the 95 % interval, or None."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class GroupTable:
    """Mean scores over a benchmark's groups of datasets, at one budget.

    context: columns of `CONTEXT` that all datasets have in common. budget: "" if no method has one.
    means: (method's label, group) -> mean. against: the same minus the mean of `full`, paired by sample; not for `full`.
    absent: group -> (datasets with a table, all datasets), for groups that lack a dataset.
    fixture: True if the data are fixtures, made for tests.
    calibrated: labels of methods that read a calibration.
    gates: sentences on the groups for which a paper prints the full cache's mean.
    """

    benchmark: str
    context: dict[str, str]
    axis: str
    budget: str
    groups: tuple[str, ...]
    methods: tuple[str, ...]
    means: dict[tuple[str, str], Mean]
    against: dict[tuple[str, str], Mean]
    absent: dict[str, tuple[int, int]]
    fixture: bool
    calibrated: tuple[str, ...]
    gates: tuple[str, ...]


def groups_of(rows: Rows) -> list[DatasetGroup]:
    """Return the groups (such as MileBench T-1) with a dataset in the rows, sorted by benchmark and name.

    Raises:
        ConfigError: no dataset of the rows belongs to a group.
    """
    pairs = rows.cells[["dataset", "config"]].drop_duplicates().itertuples(index=False)
    nodes = {dataset: dataset_node(config_of(config), dataset) for dataset, config in pairs}
    groups: dict[tuple[str, str], tuple[dict[str, str], int]] = {}
    for dataset, node in sorted(nodes.items()):
        for benchmark, sizes in ((node.get("about") or {}).get("groups") or {}).items():
            for name, size in sizes.items():
                members, _ = groups.setdefault((benchmark, name), ({}, int(size)))
                members |= {dataset: node["metrics"][0]} if node.get("metrics") else {}
    if not groups:
        raise ConfigError(
            "None of these datasets belongs to a group (about.groups of conf/dataset/<name>.yaml), so there is no mean over "
            "datasets; leave out --groups"
        )
    return [DatasetGroup(*key, *value) for key, value in sorted(groups.items())]


def group_tables(tables: Sequence[ScoreTable], rows: Rows) -> list[GroupTable]:
    """Return tables of mean scores over groups of datasets, one per benchmark, context and budget.

    Args:
        tables: tables of scores of single datasets.
        rows: the rows of these tables. Configurations in the rows state groups and expected scores of the full cache.

    Raises:
        ConfigError: no dataset of the rows belongs to a group.
        StoreError: two tables of a dataset differ in data or generation settings.
    """
    mean_tables = []
    groups = groups_of(rows)
    configs = {
        model: config
        for model, config in rows.cells[["model", "config"]].drop_duplicates().itertuples(index=False)
        if has_expected_score(config)
    }
    for benchmark in dict.fromkeys(group.benchmark for group in groups):
        columns = [group for group in groups if group.benchmark == benchmark]
        wanted_pairs = {pair for group in columns for pair in group.metrics.items()}
        chosen_tables = [table for table in tables if (table.dataset, table.metric) in wanted_pairs]
        for context in sorted({_context(table) for table in chosen_tables}):
            context_tables = [table for table in chosen_tables if _context(table) == context]
            for axis in sorted({table.axis for table in context_tables} - {"none"}) or ["none"]:
                by_dataset = _by_dataset([table for table in context_tables if table.axis in (axis, "none")], axis)
                budgets = sorted({budget for table in by_dataset.values() for budget in table.budgets}, key=float)
                context_values = dict(context)
                config = configs.get(context_values["model"])
                mean_tables += [
                    _group_table(context_values, axis, budget, by_dataset, columns, config)
                    for budget in budgets or [""]
                ]
    return mean_tables


def _context(table: ScoreTable) -> tuple[tuple[str, str], ...]:
    return tuple((key, table.context[key]) for key in CONTEXT if key not in OF_ONE_DATASET)


def _by_dataset(tables: Sequence[ScoreTable], axis: str) -> dict[str, ScoreTable]:
    """Return dataset -> table with budgets of the kind `axis`, or else table without budgets."""
    by_dataset: dict[str, ScoreTable] = {}
    for table in sorted(tables, key=lambda table: table.axis == axis):
        earlier_table = by_dataset.get(table.dataset)
        if earlier_table is not None and earlier_table.axis == table.axis:
            keys = ", ".join(key for key in OF_ONE_DATASET if earlier_table.context[key] != table.context[key])
            raise StoreError(
                f"{table.dataset} has two tables that differ in {keys}, so a mean over datasets is not defined; put these rows "
                "into separate folders"
            )
        by_dataset[table.dataset] = table
    return by_dataset


def _group_table(
    context: dict[str, str],
    axis: str,
    budget: str,
    tables: Mapping[str, ScoreTable],
    groups: Sequence[DatasetGroup],
    config: str | None,
) -> GroupTable:
    labels = tuple(dict.fromkeys(method.label for table in tables.values() for method in table.methods))
    means: dict[tuple[str, str], Mean] = {}
    differences: dict[tuple[str, str], Mean] = {}
    absent_counts: dict[str, tuple[int, int]] = {}
    fixture, gate_texts = any(name.endswith(FIXTURE) for name in tables), []
    for group in groups:
        names, n_full = [name for name in group.metrics if name in tables], 0
        if len(names) < group.size:
            absent_counts[group.name] = len(names), group.size
        else:
            full = _entries(tables, names, BASELINE, budget)
            n_full = sum(entry.scores.n for entry in full or ())
            for label in labels:
                entries = _entries(tables, names, label, budget)
                if entries is None:
                    continue
                means[label, group.name] = mean([Mean(entry.headline, entry.low, entry.high) for entry in entries])
                if full is not None and label != BASELINE:
                    cells = zip(names, entries, full, strict=True)
                    differences[label, group.name] = mean([_difference(tables[name], a, b) for name, a, b in cells])
        gate = None if config is None or fixture else find_group(config, f"{group.benchmark} {group.name}")
        if gate is not None:
            full_mean = means[BASELINE, group.name].value if (BASELINE, group.name) in means else None
            gate_texts.append(f"{group.name}: {verdict(gate, full_mean, n_full, context['transformers'])}")
    shown_groups = tuple(group.name for group in groups if group.name not in absent_counts)
    calibrated_labels = {method.label for table in tables.values() for method in table.methods if method.calibrated}
    calibrated = tuple(label for label in labels if label in calibrated_labels)
    return GroupTable(
        groups[0].benchmark,
        context,
        axis,
        budget,
        shown_groups,
        labels,
        means,
        differences,
        absent_counts,
        fixture,
        calibrated,
        tuple(gate_texts),
    )


def _entries(tables: Mapping[str, ScoreTable], names: Sequence[str], label: str, budget: str) -> list[Entry] | None:
    """Return a method's table cells on the datasets `names`; None if one is absent or has a failed sample."""
    entries = [tables[name].entry(label, budget) for name in names]
    complete = [entry for entry in entries if entry is not None and entry.value is not None]
    return complete if len(complete) == len(entries) else None


def _difference(table: ScoreTable, a: Entry, b: Entry) -> Mean:
    (difference,) = against([a.scores], b.scores, table.metric)
    assert difference.value is not None, "two complete cells of a dataset share its samples"
    return Mean(difference.value, difference.low, difference.high)


def mean(parts: Sequence[Mean]) -> Mean:
    """Return the unweighted mean of independent values, with a combined interval; without one if a value has none."""
    value = float(np.mean([part.value for part in parts]))
    half_widths = [(p.value - p.low, p.high - p.value) for p in parts if p.low is not None and p.high is not None]
    if len(half_widths) < len(parts):
        return Mean(value, None, None)
    below, above = (float(np.sqrt(sum(end**2 for end in side))) / len(parts) for side in zip(*half_widths, strict=True))
    return Mean(value, value - below, value + above)


def tables_of_groups(tables: Sequence[GroupTable], *, intervals: bool = True) -> list[Table]:
    """Return one `Table` per table of means, with a second grid for the differences to `full`."""
    return [_table(table, intervals) for table in tables]


def _table(table: GroupTable, intervals: bool) -> Table:
    caption_parts = [f"model={table.context['model']}", f"protocol={table.context['protocol']}"]
    caption_parts += [f"budget={table.budget}"] if table.budget else []
    grids = [_grid(table, table.means, score, intervals)] if table.groups else []
    if table.groups and table.against:
        grids.append(_grid(table, table.against, signed_score, intervals, "Minus full, paired by sample"))
    notes = [FIXTURE_DATA] if table.fixture else []
    if table.absent:
        groups = ", ".join(f"{name} ({here} of {size} datasets)" for name, (here, size) in table.absent.items())
        notes.append(Note(f"Not complete: {groups}.", Rank.WARNING))
    if table.calibrated:
        unseen_data = "data that the other methods have not seen (see each dataset's table)"
        notes.append(Note(f"Calibrated on {unseen_data}: {', '.join(table.calibrated)}."))
    notes += map(gate_note, table.gates)
    caption = f"{'; '.join(caption_parts)}; each dataset of a group counts once"
    return Table(f"{table.benchmark}, means over datasets", caption, grids, notes)


def _grid(
    table: GroupTable,
    means: Mapping[tuple[str, str], Mean],
    number: Callable[[float], str],
    intervals: bool,
    heading: str = "",
) -> Grid:
    def cell(mean: Mean | None) -> GridCell | str:
        if mean is None:
            return "-"
        return GridCell(number(mean.value), mean.value, interval_text(mean.low, mean.high) if intervals else "")

    labels = [label for label in table.methods if any((label, name) in means for name in table.groups)]
    rows = [[label, *(cell(means.get((label, name))) for name in table.groups)] for label in labels]
    return Grid(["method", *table.groups], rows, heading)


@dataclass(frozen=True)
class TaskRanks:
    """Ranks of the methods that compete on all tasks (one dataset each) at a budget.

    tables: one table per task. methods: labels of the m methods. ranks: int [tasks, m, 2], best and worst possible rank.
    apart: labels of methods that compete on some of the tasks only, and have no mean rank.
    """

    tables: tuple[ScoreTable, ...]
    budget: str
    methods: tuple[str, ...]
    ranks: np.ndarray
    apart: tuple[str, ...]

    @property
    def means(self) -> np.ndarray:
        """Mean over the tasks of each method's best and worst possible rank, float64 [m, 2]."""
        return self.ranks.mean(axis=0)


def task_ranks(tables: Sequence[ScoreTable]) -> list[TaskRanks]:
    """Return the ranks over at least two tasks, one item per budget and group of tables that differ only in the dataset."""
    all_ranks = [ranks for family in families(tables) for ranks in ranks_over(headlines(family))]
    return [ranks for ranks in all_ranks if len(ranks.tables) > 1]


def families(tables: Sequence[ScoreTable]) -> list[list[ScoreTable]]:
    """Group the tables that differ at most in dataset, generation settings and metric."""
    groups: dict[tuple[object, ...], list[ScoreTable]] = {}
    for table in tables:
        groups.setdefault((table.axis, *_context(table)), []).append(table)
    return list(groups.values())


def headlines(family: Sequence[ScoreTable]) -> list[ScoreTable]:
    """Return the first table of each dataset."""
    by_dataset: dict[str, ScoreTable] = {}
    for table in family:
        by_dataset.setdefault(table.dataset, table)
    return list(by_dataset.values())


def ranks_over(tasks: Sequence[ScoreTable]) -> list[TaskRanks]:
    """Rank the methods that compete on all tasks, at every budget with at least two such methods.

    A task is left out at a budget if its competing methods are not ok on the same samples. tasks: one table per dataset.
    """
    ranks_by_budget = []
    for budget in dict.fromkeys(budget for table in tasks for budget in table.budgets):
        ranked_tables = [t for t in tasks if budget in t.columns and budget not in t.unranked()]
        names_per_table = [set(table.columns[budget].names) for table in ranked_tables]
        if not ranked_tables or len(common := set.intersection(*names_per_table)) < 2:
            continue
        names = tuple(line.label for line in ranked_tables[0].methods if line.label in common)
        ranks = np.stack(
            [table.columns[budget].ranks_among(names, ALPHA / len(ranked_tables)) for table in ranked_tables]
        )
        partly_compared = tuple(sorted(set.union(*names_per_table) - common))
        ranks_by_budget.append(TaskRanks(tuple(ranked_tables), budget, names, ranks, partly_compared))
    return ranks_by_budget


def tables_of_ranks(tables: Sequence[ScoreTable]) -> list[Table]:
    """Return one `Table` per item of `task_ranks`, the method with the best mean rank first.

    Raises:
        ConfigError: no two tasks have the same methods at a budget.
    """
    all_ranks = task_ranks(tables)
    if not all_ranks:
        raise ConfigError(
            "There are no ranks: they need two tasks in which the same two methods answered all samples at one budget; leave "
            "out --ranks."
        )
    return [_rank_table(ranks, [other.tables[0].context for other in all_ranks]) for ranks in all_ranks]


def _rank_table(ranks: TaskRanks, contexts: Sequence[dict[str, str]]) -> Table:
    first_table = ranks.tables[0]
    order = np.lexsort((ranks.means[:, 1], ranks.means.sum(axis=1)))
    header = ["method", *(f"{table.dataset}, {table.metric}" for table in ranks.tables), "mean"]
    rows = [
        [ranks.methods[at], *map(ranks_text, ranks.ranks[:, at].tolist()), ranks_text(ranks.means[at], ".1f")]
        for at in order.tolist()
    ]
    tasks = len(ranks.tables)
    text = (
        f"{RANKS}, of m = {len(ranks.methods)} compared on all {tasks} tasks, each task at p <= {ALPHA:g} / {tasks}: with "
        f"{LEVEL:.0%} confidence all true ranks, and all means over these tasks, are within."
    )
    notes = [
        Note(text, Rank.MARK),
        *(Note(caption_text, Rank.WARNING) for caption_text in ranking_warning(first_table.context["model"])),
    ]
    notes += [Note(f"On some of the tasks only: {', '.join(ranks.apart)}.")] if ranks.apart else []
    caption_text = "; ".join(
        [axis_words(first_table.axis), *context_words(first_table.context, first_table.readings, contexts)]
    )
    return Table(f"Ranks over tasks at {ranks.budget}", caption_text, [Grid(header, rows)], notes)


def ranking_warning(model: str) -> list[str]:
    """Return a warning that rankings of the embedded model predict no paper's; [] for other models."""
    text = (
        "Rankings of the embedded model predict no paper's: mean Kendall's tau -.15 to the orders that papers print (87 "
        "settings, at 10 %)."
    )
    return [text] if model == "tiny" else []

"""Cells compared in pairs: the columns of a table, every pair of its lines, a part of a table, and cells against `full`.

Whoever picks two methods out of ten has still looked at ten. Of a part of a table, bold, ranks and the verdict that counts
stay those of the whole table; the correction over the part alone stands beside them, to be seen and not to be quoted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.statistics.blocks import Samples
from mmkv_bench.statistics.column import Column, compare_column, compare_pairs, holm
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.metric_kinds import aggregate_of, is_share, lower_is_better
from mmkv_bench.tables.score_table import Line, ScoreTable
from mmkv_bench.tables.scores import Scores

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Difference:
    """Score of a cell minus that of another over their `n` common samples; None without any. low, high: 95 % interval, None
    where none is given."""

    n: int
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Pair:
    """Two lines of a table at one budget, `difference` a - b over `n` common samples, `p` of the paired test.

    Of two that compete (`family`): Holm's `adjusted` p-value and `level`, at which `low` and `high` are, and who is
    `better`, if anyone. Of any others these are None, and the interval is the 95 % one. low, high: None where nothing
    is claimed, infinite where no difference would be rejected. asked: p-value by Holm's correction over the comparisons
    that were asked for at this budget.
    """

    budget: str
    a: str
    b: str
    n: int
    difference: float
    p: float
    low: float | None
    high: float | None
    test: str  # paired | none
    adjusted: float | None = None
    level: float | None = None
    better: str | None = None
    asked: float | None = None

    @property
    def compete(self) -> bool:
        """True if both are in the family that is corrected together."""
        return self.level is not None

    @property
    def order(self) -> tuple[str, str]:
        """The better one and the worse one of two that differ."""
        assert self.better is not None, "neither is better"
        return (self.a, self.b) if self.better == self.a else (self.b, self.a)

    @property
    def turned(self) -> Pair:
        """This pair with a and b exchanged."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return replace(self, a=self.b, b=self.a, difference=-self.difference, low=low, high=high)


def samples_of(scores: Sequence[Scores], metric: str) -> Samples:
    """The scores of several cells of one sheet as one array over all samples that any of them has."""
    sample_ids, clusters = scores[0].samples, scores[0].clusters
    same = all(np.array_equal(cell.samples, sample_ids) for cell in scores)
    if not same:
        sample_ids, first = np.unique(np.concatenate([cell.samples for cell in scores]), return_index=True)
        clusters = np.concatenate([cell.clusters for cell in scores])[first]
    aggregator = aggregate_of(metric)
    pooled = aggregator is not None
    width = (max((cell.parts.shape[1] for cell in scores if cell.parts is not None), default=1),) if pooled else ()
    values = np.full((len(scores), len(sample_ids), *width), np.nan)
    for i, cell in enumerate(scores):
        numbers = cell.parts if pooled else cell.values
        if numbers is not None:
            values[i, cell.ok if same else np.searchsorted(sample_ids, cell.samples[cell.ok])] = numbers[cell.ok]
    return Samples(values, clusters, aggregator, is_share(metric))


def columns(table: ScoreTable) -> dict[str, Column]:
    """Budget -> the column of the lines that compete there (see `family`); a cell over its budget, one whose entries are packed
    or can be retrieved, which are another axis, and one with samples that somebody chose do not. "" where the table has no
    budgets."""
    columns_of = {}
    for budget in table.budgets or ("",):
        competitors = {line.label: table.entries[line.label, budget] for line in table.family(budget).competitors}
        competitors = {label: entry for label, entry in competitors.items() if entry.audit.comparable}
        if competitors:
            samples = samples_of([entry.scores for entry in competitors.values()], table.metric)
            columns_of[budget] = compare_column(list(competitors), samples, falling=lower_is_better(table.metric))
    return columns_of


def separated_pairs(table: ScoreTable, against: str | None = None) -> list[Pair]:
    """The pairs of lines of the table, or of one line and the others, that differ, budget by budget."""
    separated_by_column = [
        (budget, column, np.flatnonzero(column.separated & asked_pairs(table, column, against)))
        for budget, column in table.columns.items()
    ]
    return [pair for budget, column, which in separated_by_column for pair in _pairs(budget, column, which)]


def asked_pairs(table: ScoreTable, column: Column, against: str | None = None) -> np.ndarray:
    """Mask [P] of a column's pairs whose lines the table shows, one of them `against` where that is given."""
    shown = np.isin(column.names, [line.label for line in table.methods])
    ours = np.isin(column.names, [line.label for line in table.methods if against in _names(line)])
    pairs = shown[column.a] & shown[column.b]
    return pairs if against is None else pairs & (ours[column.a] != ours[column.b])


def every_pair(table: ScoreTable) -> list[Pair]:
    """Every two lines at every budget, in the table's order, whether they compete or not; what takes no budget stands in
    every column."""
    every = []
    for budget in table.budgets or ("",):
        entries = {m.label: entry for m in table.methods if (entry := table.entry(m.label, budget)) is not None}
        names, column = list(entries), table.columns.get(budget)
        competitors = set(column.names) if column else set()
        pairs = _pairs(budget, column) if column else []
        a, b = np.triu_indices(len(names), 1)
        others = [not {names[i], names[j]} <= competitors for i, j in zip(a, b, strict=True)]
        samples = samples_of([entry.scores for entry in entries.values()], table.metric)
        other = compare_pairs(names, samples, a[others], b[others], falling=lower_is_better(table.metric))
        by_names = {(pair.a, pair.b): pair for pair in [*pairs, *_pairs(budget, other, compete=False)]}
        every += [by_names[names[i], names[j]] for i, j in zip(a, b, strict=True)]
    return [pair for pair in every if pair.n]


def _pairs(budget: str, column: Column, which: np.ndarray | None = None, compete: bool = True) -> list[Pair]:
    which = np.arange(len(column.p)) if which is None else which
    made = []
    for at, (low, high) in zip(which, column.intervals(which, None if compete else ALPHA), strict=True):
        a, b = column.names[column.a[at]], column.names[column.b[at]]
        n, difference, p = int(column.n[at]), float(column.difference[at]), float(column.p[at])
        pair = Pair(budget, a, b, n, difference, p, None, None, "none")
        if not np.isnan(low):
            pair = replace(pair, low=float(low), high=float(high), test="paired")
        if compete:
            better = (a if column.a_better[at] else b) if column.separated[at] else None
            pair = replace(pair, adjusted=float(column.adjusted[at]), level=float(column.level[at]), better=better)
        made.append(pair)
    return made


def against(scores: Sequence[Scores], baseline: Scores, metric: str) -> list[Difference]:
    """Each of the cells minus `baseline`, with 95 % intervals; a cell's numbers do not depend on which others are given."""
    samples = samples_of([*scores, baseline], metric)
    a = np.arange(len(scores))
    column = compare_pairs([""] * (len(a) + 1), samples, a, np.full(len(a), len(a)))
    return [
        Difference(int(n), float(value) if n else None, *((None, None) if np.isnan(low) else (float(low), float(high))))
        for n, value, (low, high) in zip(column.n, column.difference, column.intervals(alpha=ALPHA), strict=True)
    ]


def narrowed(
    tables: Sequence[ScoreTable],
    methods: Sequence[str] | None = None,
    budgets: Sequence[str] | None = None,
    against: str | None = None,
) -> list[ScoreTable]:
    """The tables with these lines and budgets alone, those that have none of them left out; what takes no budget stays beside
    one that is shown. Columns, and with them bold and ranks, stay those of the whole tables.

    Args:
        methods: names or labels of lines; None = all. against: one more.

    Raises ConfigError when no table has a line or a budget that is named.
    """
    also = [against] if against else []
    wanted = None if methods is None else [*methods, *also]
    lines = {name for table in tables for line in table.methods for name in _names(line)}
    for what, names, present in (
        ("method", wanted or also, lines),
        ("budget", budgets or (), {budget for table in tables for budget in table.budgets}),
    ):
        for name in names:
            if name not in present:
                raise ConfigError(f"The rows hold no {what} '{name}': {nearest(name, present)}.")
    parts = [(table, _part(table, wanted, budgets)) for table in tables]
    return [part for whole, part in parts if part.entries and (part.budgets or not (budgets and whole.budgets))]


def _part(table: ScoreTable, methods: Sequence[str] | None, budgets: Sequence[str] | None) -> ScoreTable:
    table.unranked()  # whether the whole columns can be ranked, which is remembered by budget and goes along
    shown_budgets = [budget for budget in table.budgets if budgets is None or budget in budgets]
    labels = {line.label for line in table.methods if methods is None or not _names(line).isdisjoint(methods)}

    def among(values: dict[tuple[str, str], _Value]) -> dict[tuple[str, str], _Value]:
        return {key: value for key, value in values.items() if key[0] in labels and key[1] in ("", *shown_budgets)}

    entries, waiting = among(table.entries), among(table.waiting)
    shown = {*entries, *waiting}
    return replace(
        table,
        methods=tuple(line for line in table.methods if line.label in {label for label, _ in shown}),
        budgets=tuple(budget for budget in shown_budgets if budget in {budget for _, budget in shown}),
        entries=entries,
        waiting=waiting,
        columns={budget: column for budget, column in table.columns.items() if budget in ("", *shown_budgets)},
        calibrations={label: words for label, words in table.calibrations.items() if label in labels},
        versions={label: versions for label, versions in table.versions.items() if label in labels},
    )


def _names(line: Line) -> set[str]:
    """The names by which a line may be asked for."""
    return {line.label, line.name}


def comparisons(table: ScoreTable, against: str | None = None) -> list[Pair]:
    """Every two lines of the table at every budget, or every other line with `against` (its score minus theirs), with `asked`."""
    ours = {line.label for line in table.methods if against in _names(line)}
    pairs = [pair for pair in every_pair(table) if against is None or len({pair.a, pair.b} & ours) == 1]
    pairs = [pair.turned if pair.b in ours else pair for pair in pairs]
    corrected = []
    for budget in dict.fromkeys(pair.budget for pair in pairs):
        group = [pair for pair in pairs if pair.budget == budget]
        adjusted = holm(np.array([pair.p for pair in group]))[0].tolist()
        corrected += [replace(pair, asked=p) for pair, p in zip(group, adjusted, strict=True)]
    return corrected


def better(pair: Pair, p: float | None, falling: bool) -> str:
    """The one that is proven better at a corrected p-value, if any. falling: less is better."""
    if p is None:
        return "no rivals"
    if p > ALPHA:
        return "undecided"
    return pair.a if (pair.difference > 0) != falling else pair.b

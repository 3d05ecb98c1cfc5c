"""Comparisons of cells in pairs: columns of a table, every pair of its lines, a part of a table, and cells against `full`.

Whoever picks two methods out of ten has still looked at ten. In a part of a table, bold, ranks and the verdict that counts
are still those of the whole table. The correction over the part alone is printed beside them, for information only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from mmkv_bench.statistics.cluster_sums import Samples
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.metric_kinds import aggregate_of, is_share, lower_is_better
from mmkv_bench.statistics.paired_tests import Column, compare_column, compare_pairs, holm
from mmkv_bench.tables.score_table import Line, ScoreTable
from mmkv_bench.tables.scores import Scores
from mmkv_bench.tables.stored_rows import check_names

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Difference:
    """Score of a cell minus score of another cell over their `n` common samples; None without common samples.

    low, high: ends of the 95 % interval, or None."""

    n: int
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Pair:
    """Comparison of two lines of a table, `a` and `b`, at one budget.

    difference: score of a - score of b over `n` common samples. p: p-value of the paired test, uncorrected.
    low, high: confidence interval of the difference; None without a claim, infinite if no difference would be rejected.
    adjusted: p-value with Holm's correction over all pairs of competing lines (`family`).
    level: confidence level of the interval. better: label of the line that is proven better, if one is.
    These three are None unless both lines compete; the interval then has 95 %.
    asked: p-value with Holm's correction over only the comparisons that the user requested at this budget.
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
        """True if both lines are compared for bold and ranks, so that their p-value is corrected together with the others."""
        return self.level is not None

    @property
    def turned(self) -> Pair:
        """The same pair with a and b exchanged."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return replace(self, a=self.b, b=self.a, difference=-self.difference, low=low, high=high)


def samples_of(scores: Sequence[Scores], metric: str) -> Samples:
    """Join the scores of several cells of one sheet into one array over all samples that any of the cells has.

    Its shape is [cells, samples], or [cells, samples, parts] for a pooled metric; NaN where a cell has no valid score.
    """
    sample_ids, clusters = scores[0].samples, scores[0].clusters
    same_samples = all(np.array_equal(cell.samples, sample_ids) for cell in scores)
    if not same_samples:
        sample_ids, first = np.unique(np.concatenate([cell.samples for cell in scores]), return_index=True)
        clusters = np.concatenate([cell.clusters for cell in scores])[first]
    aggregator = aggregate_of(metric)
    pooled = aggregator is not None
    width = (max((cell.parts.shape[1] for cell in scores if cell.parts is not None), default=1),) if pooled else ()
    values = np.full((len(scores), len(sample_ids), *width), np.nan)
    for i, cell in enumerate(scores):
        numbers = cell.parts if pooled else cell.values
        if numbers is not None:
            values[i, cell.ok if same_samples else np.searchsorted(sample_ids, cell.samples[cell.ok])] = numbers[
                cell.ok
            ]
    return Samples(values, clusters, aggregator, is_share(metric))


def columns(table: ScoreTable) -> dict[str, Column]:
    """Run paired tests between the competing methods of a table, and return budget -> tested column.

    The key is "" if the table has no budgets. Three kinds of table cells are left out: cells over their budget, cells with
    quantised or offloaded entries, whose size the number of entries does not tell, and cells with samples that were requested
    by id.
    """
    columns_of = {}
    for budget in table.budgets or ("",):
        entries = {line.label: table.entries[line.label, budget] for line in table.family(budget).competitors}
        scores = {label: entry.scores for label, entry in entries.items() if entry.audit.comparable}
        if scores:
            samples = samples_of([*scores.values()], table.metric)
            columns_of[budget] = compare_column([*scores], samples, falling=lower_is_better(table.metric))
    return columns_of


def separated_pairs(table: ScoreTable, against: str | None = None) -> list[Pair]:
    """Return the pairs of lines that are proven different, budget by budget; with `against`, only pairs with that line."""
    return [
        pair
        for budget, column in table.columns.items()
        for pair in _pairs(budget, column, np.flatnonzero(column.separated & asked_pairs(table, column, against)))
    ]


def asked_pairs(table: ScoreTable, column: Column, against: str | None = None) -> np.ndarray:
    """Mask the pairs [P] of `column` whose two lines are both shown in the table.

    against: name or label of a line; then only pairs with this line.
    """
    in_table = np.isin(column.names, [line.label for line in table.methods])
    in_against = np.isin(column.names, [line.label for line in table.methods if against in _names(line)])
    is_asked = in_table[column.a] & in_table[column.b]
    return is_asked if against is None else is_asked & (in_against[column.a] != in_against[column.b])


def every_pair(table: ScoreTable) -> list[Pair]:
    """Return all pairs of table lines (methods) at every budget, in the table's order, including pairs that do not compete.

    A line without a budget is paired with the others at every budget. Pairs without common samples are left out.
    """
    pairs_of_budgets = []
    for budget in table.budgets or ("",):
        entries = {m.label: entry for m in table.methods if (entry := table.entry(m.label, budget)) is not None}
        names, column = list(entries), table.columns.get(budget)
        competitors = set(column.names) if column else set()
        pairs = _pairs(budget, column) if column else []
        a, b = np.triu_indices(len(names), 1)
        others = [not {names[i], names[j]} <= competitors for i, j in zip(a, b, strict=True)]
        samples = samples_of([entry.scores for entry in entries.values()], table.metric)
        other_column = compare_pairs(names, samples, a[others], b[others], falling=lower_is_better(table.metric))
        by_names = {(pair.a, pair.b): pair for pair in [*pairs, *_pairs(budget, other_column, compete=False)]}
        pairs_of_budgets += [by_names[names[i], names[j]] for i, j in zip(a, b, strict=True)]
    return [pair for pair in pairs_of_budgets if pair.n]


def _pairs(budget: str, column: Column, which: np.ndarray | None = None, compete: bool = True) -> list[Pair]:
    which = np.arange(len(column.p)) if which is None else which
    built_pairs = []
    for at, (low, high) in zip(which, column.intervals(which, None if compete else ALPHA), strict=True):
        a, b = column.names[column.a[at]], column.names[column.b[at]]
        n, difference, p = int(column.n[at]), float(column.difference[at]), float(column.p[at])
        interval = (None, None, "none") if np.isnan(low) else (float(low), float(high), "paired")
        pair = Pair(budget, a, b, n, difference, p, *interval)
        if compete:
            better = (a if column.a_better[at] else b) if column.separated[at] else None
            pair = replace(pair, adjusted=float(column.adjusted[at]), level=float(column.level[at]), better=better)
        built_pairs.append(pair)
    return built_pairs


def against(scores: Sequence[Scores], baseline: Scores, metric: str) -> list[Difference]:
    """Return each cell's score minus `baseline`, with 95 % intervals. A cell's numbers do not depend on the other cells."""
    samples = samples_of([*scores, baseline], metric)
    line_numbers = np.arange(len(scores))
    column = compare_pairs(
        [""] * (len(line_numbers) + 1), samples, line_numbers, np.full(len(line_numbers), len(line_numbers))
    )
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
    """Return copies of the tables with only the given methods and budgets; tables without any of them are left out.

    Lines without a budget stay. Bold and ranks stay those of the whole tables, because choosing lines afterwards must not change
    a verdict.

    Args:
        methods: names or labels of table lines; None: all.
        budgets: budgets as text; None: all.
        against: name or label of one more line to keep.

    Raises:
        ConfigError: no table has a line or a budget of that name.
    """
    extra_names = [against] if against else []
    asked_names = None if methods is None else [*methods, *extra_names]
    lines = {name for table in tables for line in table.methods for name in _names(line)}
    check_names("method", asked_names or extra_names, lines)
    check_names("budget", budgets or (), {budget for table in tables for budget in table.budgets})
    narrowed_tables = [(table, _part(table, asked_names, budgets)) for table in tables]
    return [
        part for whole, part in narrowed_tables if part.entries and (part.budgets or not (budgets and whole.budgets))
    ]


def _part(table: ScoreTable, methods: Sequence[str] | None, budgets: Sequence[str] | None) -> ScoreTable:
    table.unranked()  # decides for each whole column whether it can be ranked, and remembers it for the part
    shown_budgets = [budget for budget in table.budgets if budgets is None or budget in budgets]
    labels = {line.label for line in table.methods if methods is None or not _names(line).isdisjoint(methods)}

    def among(values: dict[tuple[str, str], _Value]) -> dict[tuple[str, str], _Value]:
        return {key: value for key, value in values.items() if key[0] in labels and key[1] in ("", *shown_budgets)}

    entries, unscored_answers = among(table.entries), among(table.waiting)
    shown_keys = {*entries, *unscored_answers}
    return replace(
        table,
        methods=tuple(line for line in table.methods if line.label in {label for label, _ in shown_keys}),
        budgets=tuple(budget for budget in shown_budgets if budget in {budget for _, budget in shown_keys}),
        entries=entries,
        waiting=unscored_answers,
        columns={budget: column for budget, column in table.columns.items() if budget in ("", *shown_budgets)},
        calibrations={label: words for label, words in table.calibrations.items() if label in labels},
        versions={label: versions for label, versions in table.versions.items() if label in labels},
    )


def _names(line: Line) -> set[str]:
    """Return the names that a user may write for this line of a table."""
    return {line.label, line.name}


def comparisons(table: ScoreTable, against: str | None = None) -> list[Pair]:
    """Return all pairs of table lines (methods) at every budget, with the p-value `asked`.

    It is corrected over only these pairs at the same budget.

    against: name or label of a line. Then only pairs with this line are returned, as its score minus the other's.
    """
    labels_against = {line.label for line in table.methods if against in _names(line)}
    pairs = [pair for pair in every_pair(table) if against is None or len({pair.a, pair.b} & labels_against) == 1]
    pairs = [pair.turned if pair.b in labels_against else pair for pair in pairs]
    corrected = []
    for _, same_budget in groupby(pairs, lambda pair: pair.budget):  # `every_pair` goes budget by budget
        budget_pairs = list(same_budget)
        adjusted = holm(np.array([pair.p for pair in budget_pairs]))[0].tolist()
        corrected += [replace(pair, asked=p) for pair, p in zip(budget_pairs, adjusted, strict=True)]
    return corrected


def better(pair: Pair, p: float | None, falling: bool) -> str:
    """Return the label of the better line at the corrected p-value `p`, or `undecided`, or `no rivals` if p is None.

    falling: smaller values are better.
    """
    if p is None:
        return "no rivals"
    if p > ALPHA:
        return "undecided"
    return pair.a if (pair.difference > 0) != falling else pair.b

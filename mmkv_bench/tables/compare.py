"""Paired comparisons between the lines of a table, and between settings and the full cache.

Whoever picks two methods out of ten has looked at ten. So a table with selected lines keeps bold, ranks and verdicts of the whole
table, and p-values that are corrected over the selected pairs alone are printed beside them, for information.
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
from mmkv_bench.tables.sample_scores import Scores
from mmkv_bench.tables.score_table import Line, ScoreTable
from mmkv_bench.tables.stored_rows import check_names

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Difference:
    """Difference of two scores over `n` common samples. value: None without common samples.

    low, high: ends of the 95 % interval, or None.
    """

    n: int
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Pair:
    """Comparison of two lines of a table, labelled `a` and `b`, at one budget.

    difference: score of a - score of b over `n` common samples. p: p-value of the paired test, uncorrected.
    low, high: ends of the confidence interval of the difference; None without an interval, infinite if the test would reject no
        difference.
    adjusted: p-value with Holm's correction over all pairs of competing lines (`family`); None unless both lines compete.
    level: confidence level of the interval; None unless both lines compete (the interval then has 95 %).
    better: label of the line that is proven better; None if neither is, and None unless both lines compete.
    p_requested: p-value with Holm's correction over only the comparisons that the user requested at this budget.
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
    p_requested: float | None = None

    @property
    def compete(self) -> bool:
        """True if both lines compete for bold and ranks."""
        return self.level is not None

    @property
    def swapped(self) -> Pair:
        """The same pair with a and b exchanged."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return replace(self, a=self.b, b=self.a, difference=-self.difference, low=low, high=high)


def samples_of(scores: Sequence[Scores], metric: str) -> Samples:
    """Join several `Scores` of one sheet into one array over all samples that occur in any of them.

    Its shape is [len(scores), samples], or [len(scores), samples, parts] for a pooled metric; NaN where a sample is not ok.
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
    """Run paired tests between the competing methods at each budget, and return budget -> results ("" without budgets).

    Methods that `Audit.comparable` excludes at a budget, such as methods with quantised entries, are left out.
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
    """Return the pairs of lines that are proven different, budget by budget. against: as in `requested_pairs`."""
    return [
        pair
        for budget, column in table.columns.items()
        for pair in _pairs(budget, column, np.flatnonzero(column.separated & requested_pairs(table, column, against)))
    ]


def requested_pairs(table: ScoreTable, column: Column, against: str | None = None) -> np.ndarray:
    """Mask the pairs of `column` whose two lines are both in the table, bool [pairs].

    against: name or label of a line; then only pairs with this line are masked.
    """
    in_table = np.isin(column.names, [line.label for line in table.methods])
    in_against = np.isin(column.names, [line.label for line in table.methods if against in _names(line)])
    is_asked = in_table[column.a] & in_table[column.b]
    return is_asked if against is None else is_asked & (in_against[column.a] != in_against[column.b])


def every_pair(table: ScoreTable) -> list[Pair]:
    """Return all pairs of lines with common samples, budget by budget, including pairs that do not compete.

    A line without a budget is paired with the others at every budget.
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
    """Return each of `scores` minus `baseline`, with 95 % intervals that are not corrected for the number of `scores`."""
    samples = samples_of([*scores, baseline], metric)
    line_numbers = np.arange(len(scores))
    column = compare_pairs(
        [""] * (len(line_numbers) + 1), samples, line_numbers, np.full(len(line_numbers), len(line_numbers))
    )
    return [
        Difference(int(n), float(value) if n else None, *((None, None) if np.isnan(low) else (float(low), float(high))))
        for n, value, (low, high) in zip(column.n, column.difference, column.intervals(alpha=ALPHA), strict=True)
    ]


def select_lines(
    tables: Sequence[ScoreTable],
    methods: Sequence[str] | None = None,
    budgets: Sequence[str] | None = None,
    against: str | None = None,
) -> list[ScoreTable]:
    """Return copies of the tables with only the given methods and budgets; tables without any of them are left out.

    Lines without a budget stay, whatever `budgets`. Bold and ranks stay those of the whole tables.

    Args:
        methods: names or labels of lines; None: all.
        budgets: budgets as text; None: all.
        against: name or label of one more line to keep.

    Raises:
        ConfigError: no table has a given line or budget.
    """
    extra_names = [against] if against else []
    requested_names = None if methods is None else [*methods, *extra_names]
    lines = {name for table in tables for line in table.methods for name in _names(line)}
    check_names("method", requested_names or extra_names, lines)
    check_names("budget", budgets or (), {budget for table in tables for budget in table.budgets})
    narrowed_tables = [(table, _part(table, requested_names, budgets)) for table in tables]
    return [
        part for whole, part in narrowed_tables if part.entries and (part.budgets or not (budgets and whole.budgets))
    ]


def _part(table: ScoreTable, methods: Sequence[str] | None, budgets: Sequence[str] | None) -> ScoreTable:
    table.unranked()  # caches for each budget whether the whole table's methods can be ranked
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
    return {line.label, line.name}


def comparisons(table: ScoreTable, against: str | None = None) -> list[Pair]:
    """Return all pairs of lines, with p-values `p_requested` that are corrected over the returned pairs of the same budget.

    against: name or label of a line. Then only pairs with this line are returned, with this line as `a`.
    """
    labels_against = {line.label for line in table.methods if against in _names(line)}
    pairs = [pair for pair in every_pair(table) if against is None or len({pair.a, pair.b} & labels_against) == 1]
    pairs = [pair.swapped if pair.b in labels_against else pair for pair in pairs]
    corrected = []
    for _, same_budget in groupby(pairs, lambda pair: pair.budget):  # `every_pair` goes budget by budget
        budget_pairs = list(same_budget)
        adjusted = holm(np.array([pair.p for pair in budget_pairs]))[0].tolist()
        corrected += [replace(pair, p_requested=p) for pair, p in zip(budget_pairs, adjusted, strict=True)]
    return corrected


def better(pair: Pair, p: float | None, falling: bool) -> str:
    """Return the label of the better line; `undecided` if `p` is above `ALPHA`; `no rivals` if `p` is None.

    p: corrected p-value. falling: True if smaller scores are better.
    """
    if p is None:
        return "no rivals"
    if p > ALPHA:
        return "undecided"
    return pair.a if (pair.difference > 0) != falling else pair.b

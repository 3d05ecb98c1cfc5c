"""What stands below a table about bold, ranks and separated pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf

from mmkv_bench.statistics.column import Column
from mmkv_bench.statistics.intervals import ALPHA, LEVEL
from mmkv_bench.statistics.metric_kinds import Pooled
from mmkv_bench.statistics.paired_test import LARGEST_SHARE
from mmkv_bench.tables.family import CONTROLS
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.score_table import ScoreTable


def best_notes(table: ScoreTable, apart: Sequence[str]) -> list[str]:
    """What bold means, where there is none, and who does not compete for it. apart: marks of cells that do not."""
    ranked = {budget: column for budget in table.budgets if (column := table.ranked(budget))}
    columns = {budget: column for budget, column in table.columns.items() if len(column.names) > 1}
    if not columns:
        return _study_notes(table)
    lines = []
    if ranked:
        sizes = sorted({len(column.names) for column in ranked.values()})
        m = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        lines.append(
            f"bold: of the m = {m} that compete at this budget none is proven better (paired tests at p <= {ALPHA:g} / (m - 1), "
            f"or a pair separated by Holm); the truly best one is bold with {LEVEL:.0%} confidence, and not bold is no proof of "
            "being worse. Ranks: from 1 + those proven better to m - those proven worse."
        )
    blind = [budget for budget, column in columns.items() if not column.decidable.any()]
    undecided = [budget for budget, column in columns.items() if not column.beats.any() and budget not in blind]
    if undecided:
        lines.append(f"no bold{_at(undecided)}: no method is proven better than another there.")
    if blind:
        lines.append(
            f"not decidable{_at(blind)}: one document, image or video holds more than {LARGEST_SHARE:.0%} of the samples."
        )
    lines += _resolution(table, columns) + _study_notes(table)
    return lines + (_rival_notes(table, list(ranked), apart) if ranked else [])


def _at(budgets: Sequence[str]) -> str:
    return f" at {', '.join(budgets)}" if any(budgets) else ""


def _resolution(table: ScoreTable, columns: Mapping[str, Column]) -> list[str]:
    """The smallest gap that each column could have separated, in one line; none where no column could separate any."""
    gaps = {budget: gap for budget, column in columns.items() if (gap := column.resolution) is not None}
    if not gaps:
        return []
    ratio = isinstance(table.aggregator, Pooled) and table.aggregator.ratio
    words = [
        f"{'none' if gap == inf else f'a ratio of {exp(gap):.3g}' if ratio else f'{gap:.2g}'}{budget and f' at {budget}'}"
        for budget, gap in gaps.items()
    ]
    return [f"smallest gap that could have been separated: {', '.join(words)}."]


def _study_notes(table: ScoreTable) -> list[str]:
    """Whether the study's primary endpoint is in this table, or all of it is exploratory."""
    primary = table.primary
    if primary is None:
        return []
    here = (table.dataset, table.metric, table.context["protocol"]) == (
        primary.dataset,
        primary.metric,
        primary.protocol,
    )
    if here and primary.budget in table.budgets:
        late = " (named when its answers were there already)" * primary.late
        return [f"primary endpoint of this study{late}: the column {primary.budget}; everything else is exploratory."]
    return [f"exploratory: the primary endpoint of this study is {primary}."]


def _rival_notes(table: ScoreTable, budgets: Sequence[str], apart: Sequence[str]) -> list[str]:
    """Who does not compete, of all lines that a reader might take for rivals."""
    families = [table.family(budget) for budget in budgets]
    presets = {label: of for family in families for label, of in family.presets.items()}
    controls = [method.label for method in table.methods if method.base in CONTROLS and method.base != BASELINE]
    words = [f"{', '.join(controls)} (control{'s' * (len(controls) > 1)})"] if controls else []
    words += [f"{label} (a preset of {of})" for label, of in presets.items()]
    words += [f"cells marked {' '.join(apart)}"] if apart else []
    lines = [f"shown, but no rivals: {'; '.join(words)}."] if words else []
    whole = dict.fromkeys(family.method for family in families if family.method)
    return lines + [f"all lines compete, for nearly all are presets of {method}." for method in whole]


def pair_summary(table: ScoreTable) -> list[str]:
    """Per budget: how many pairs of those that compete are separated."""
    return [
        f"{f'budget {budget}: ' if budget else ''}{int(column.separated.sum())} of {len(column.p)} pairs separated, of "
        f"{len(column.names)} that compete"
        for budget, column in table.columns.items()
    ]

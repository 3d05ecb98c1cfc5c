"""The part of a table that was asked for, and every comparison in it beside what the whole table says of it.

Who picks two methods out of ten has still looked at ten: bold, ranks and the verdict that counts stay those of the whole
table's family, and the correction over what was asked alone stands beside them, to be seen and not to be quoted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.statistics.column import holm
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.tables.compare import Pair, every_pair
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.score_table import ScoreTable


@dataclass(frozen=True)
class Comparison:
    """Two lines that were to be compared. `asked`: p-value by Holm's correction over those asked for at this budget; `whole`:
    over all that compete there, None where one of the two does not."""

    pair: Pair
    asked: float

    @property
    def whole(self) -> float | None:
        return self.pair.adjusted


def narrowed(
    tables: Sequence[ScoreTable],
    methods: Sequence[str] | None = None,
    budgets: Sequence[str] | None = None,
    against: str | None = None,
) -> list[ScoreTable]:
    """The tables with these lines and budgets alone, those that have none of them left out; what takes no budget stays beside
    any. Columns, and with them bold and ranks, stay those of the whole tables.

    Args:
        methods: names or labels of lines; None = all. against: one more.

    Raises ConfigError when no table has a line or a budget that is named.
    """
    wanted = None if methods is None else [*methods, *([against] if against else [])]
    for what, names, present in (
        (
            "method",
            wanted or ([against] if against else []),
            {name for t in tables for m in t.methods for name in _names(m)},
        ),
        ("budget", budgets or (), {budget for table in tables for budget in table.budgets}),
    ):
        for name in names:
            if name not in present:
                raise ConfigError(f"The rows hold no {what} '{name}': {nearest(name, present)}.")
    found = [_narrow(table, wanted, budgets) for table in tables]
    return [table for table in found if table.entries]


def _narrow(table: ScoreTable, methods: Sequence[str] | None, budgets: Sequence[str] | None) -> ScoreTable:
    table.unranked()  # whether the whole columns can be ranked, which is remembered by budget and goes along
    left = [budget for budget in table.budgets if budgets is None or budget in budgets]
    labels = {line.label for line in table.methods if methods is None or not _names(line).isdisjoint(methods)}
    entries, waiting = _of(table.entries, labels, left), _of(table.waiting, labels, left)
    shown = [*entries, *waiting]
    return replace(
        table,
        methods=tuple(line for line in table.methods if line.label in {label for label, _ in shown}),
        budgets=tuple(budget for budget in left if budget in {budget for _, budget in shown}),
        entries=entries,
        waiting=waiting,
        columns={budget: column for budget, column in table.columns.items() if budget in ("", *left)},
        calibrations={label: told for label, told in table.calibrations.items() if label in labels},
        versions={label: own for label, own in table.versions.items() if label in labels},
    )


_Held = TypeVar("_Held")


def _of(held: dict[tuple[str, str], _Held], labels: set[str], budgets: Sequence[str]) -> dict[tuple[str, str], _Held]:
    return {key: value for key, value in held.items() if key[0] in labels and key[1] in ("", *budgets)}


def _names(line: Line) -> set[str]:
    """What a line may be asked for by."""
    return {line.label, line.name}


def comparisons(table: ScoreTable, against: str | None = None) -> list[Comparison]:
    """Every two lines of the table at every budget, or every other line with `against` (its score minus theirs)."""
    ours = {line.label for line in table.methods if against in _names(line)}
    pairs = [pair for pair in every_pair(table) if against is None or len({pair.a, pair.b} & ours) == 1]
    pairs = [_turned(pair) if ours and pair.b in ours else pair for pair in pairs]
    found: list[Comparison] = []
    for budget in dict.fromkeys(pair.budget for pair in pairs):
        own = [pair for pair in pairs if pair.budget == budget]
        adjusted = holm(np.array([pair.p for pair in own]))[0]
        found += [Comparison(pair, float(p)) for pair, p in zip(own, adjusted, strict=True)]
    return found


def _turned(pair: Pair) -> Pair:
    low, high = (None if end is None else -end for end in (pair.high, pair.low))
    return replace(pair, a=pair.b, b=pair.a, difference=-pair.difference, low=low, high=high)


def better(one: Comparison, p: float | None, falling: bool) -> str:
    """Who is proven better at a corrected p-value, if anyone. falling: less is better."""
    if p is None:
        return "no rivals"
    if p > ALPHA:
        return "undecided"
    return one.pair.a if (one.pair.difference > 0) != falling else one.pair.b

"""Ranks over tasks: on each dataset the ranks that are proven, and the mean over datasets, whose ends hold together.

The mean is that of the true ranks on these very tasks, not on tasks of which they would be a sample. On each of K tasks a
method is proven better at alpha / K in place of alpha, so that with 95 % confidence every rank of every task is within its ends,
and so is every mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.tables.captions import axis_words, context_words
from mmkv_bench.tables.notes import task_rank_notes
from mmkv_bench.tables.rows import CONTEXT
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.table import Grid, Table

_OF_A_TASK = ("dataset", "dataset_fingerprint", "generation")


@dataclass(frozen=True)
class TaskRanks:
    """Ranks of the methods that compete on every one of the tasks at a budget.

    tables: one for each task; methods: labels [m]; ranks: from and to, int [tasks, m, 2]; apart: labels that compete on some
    of the tasks only.
    """

    tables: tuple[ScoreTable, ...]
    budget: str
    methods: tuple[str, ...]
    ranks: np.ndarray
    apart: tuple[str, ...]

    @property
    def means(self) -> np.ndarray:
        """Ends of the mean rank over tasks, float64 [m, 2]."""
        return self.ranks.mean(axis=0)


def task_ranks(tables: Sequence[ScoreTable]) -> list[TaskRanks]:
    """Ranks at every budget at which two methods compete on two tasks or more, of every family of tasks."""
    every = [ranks for family in families(tables) for ranks in ranks_over(headlines(family))]
    return [ranks for ranks in every if len(ranks.tables) > 1]


def families(tables: Sequence[ScoreTable]) -> list[list[ScoreTable]]:
    """Tables that belong together: of tasks that differ in nothing but the dataset."""
    groups: dict[tuple[str, ...], list[ScoreTable]] = {}
    for table in tables:
        key = (table.axis, *(table.context[name] for name in CONTEXT if name not in _OF_A_TASK))
        groups.setdefault(key, []).append(table)
    return list(groups.values())


def headlines(family: Sequence[ScoreTable]) -> list[ScoreTable]:
    """One table of each dataset: that of its first metric."""
    by_dataset: dict[str, ScoreTable] = {}
    for table in family:
        by_dataset.setdefault(table.dataset, table)
    return list(by_dataset.values())


def ranks_over(tasks: Sequence[ScoreTable]) -> list[TaskRanks]:
    """Ranks at every budget at which two methods compete on all of these tasks, one of each dataset. Those with failed samples
    among the ones that compete are left out."""
    found = []
    for budget in dict.fromkeys(budget for table in tasks for budget in table.budgets):
        ranked = [t for t in tasks if budget in t.columns and budget not in t.unranked()]
        among = [set(table.columns[budget].names) for table in ranked]
        if not ranked or len(common := set.intersection(*among)) < 2:
            continue
        names = tuple(line.label for line in ranked[0].methods if line.label in common)
        ranks = np.stack([table.columns[budget].ranks_among(names, ALPHA / len(ranked)) for table in ranked])
        apart = tuple(sorted(set.union(*among) - common))
        found.append(TaskRanks(tuple(ranked), budget, names, ranks, apart))
    return found


def tables_of_ranks(tables: Sequence[ScoreTable]) -> list[Table]:
    """A table for every budget, the best mean first.

    Raises ConfigError where no two tasks have the same methods at a budget.
    """
    every = task_ranks(tables)
    if not every:
        raise ConfigError(
            "No two tasks have two methods at the same budget that compete and are ok on the same samples: no ranks over tasks."
        )
    return [_table(ranks, [other.tables[0].context for other in every]) for ranks in every]


def _table(ranks: TaskRanks, contexts: Sequence[dict[str, str]]) -> Table:
    first = ranks.tables[0]
    order = np.lexsort((ranks.means[:, 1], ranks.means.sum(axis=1)))
    header = ["method", *(f"{table.dataset}, {table.metric}" for table in ranks.tables), "mean"]
    rows = [
        [
            ranks.methods[at],
            *("-".join(map(str, dict.fromkeys(ends))) for ends in ranks.ranks[:, at].tolist()),
            "-".join(dict.fromkeys(f"{end:.1f}" for end in ranks.means[at])),
        ]
        for at in order.tolist()
    ]
    notes = task_rank_notes(len(ranks.methods), len(ranks.tables), first.context["model"], ranks.apart)
    words = "; ".join([axis_words(first.axis), *context_words(first.context, first.readings, contexts)])
    return Table(f"Ranks over tasks at {ranks.budget}", words, [Grid(header, rows)], notes)

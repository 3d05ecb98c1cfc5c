"""Which tables the overview shows together, and the ranks of their methods over the tasks: those of `tables --ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmkv_bench.tables.captions import context_words, line_label
from mmkv_bench.tables.notes import predicts_nothing
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.task_ranks import TaskRanks, families, headlines, ranks_over


def shown(store: int, tables: Sequence[ScoreTable], first: int) -> list[dict[str, Any]]:
    """One for every family of tasks by each one's first metric, and one for every metric of some of them.

    Args:
        store, tables: all of one store. first: the number of the first table's view.
    """
    contexts = [table.context for table in tables]
    number = {id(table): first + place for place, table in enumerate(tables)}
    found = []
    for family in families(tables):
        metrics = dict.fromkeys(table.metric for table in family)
        choices = [headlines(family), *([t for t in family if t.metric == metric] for metric in metrics)]
        for own in {tuple(map(id, choice)): choice for choice in choices}.values():
            metric = own[0].metric if len({table.metric for table in own}) == 1 else "each task's first metric"
            words = context_words(own[0].context, own[0].readings, contexts)
            found.append(
                {
                    "store": store,
                    "words": " · ".join([metric, own[0].axis, *words, f"{len(own)} task{'s' * (len(own) > 1)}"]),
                    "views": [number[id(table)] for table in own],
                    "ranks": {one.budget: _ranks(one, number) for one in ranks_over(own)},
                }
            )
    return found


def _ranks(found: TaskRanks, number: dict[int, int]) -> dict[str, Any]:
    """note: what to say beside them; methods: as entries name them; ends: [tasks][methods][2]; means: [methods][2]."""
    names = {line.label: line_label(line) for table in found.tables for line in table.methods}
    return {
        "views": [number[id(table)] for table in found.tables],
        "methods": [names[label] for label in found.methods],
        "note": " ".join(predicts_nothing(found.tables[0].context["model"])),
        "apart": [names[label] for label in found.apart],
        "ends": found.ranks.tolist(),
        "means": found.means.round(6).tolist(),
    }

"""One store in a report: the scripts of its cells, of its groups of cells that answered the same, and of single samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.report import cells as cell_pages
from mmkv_bench.report.command import Commands
from mmkv_bench.report.folder import Folder
from mmkv_bench.report.kept_maps import kept_maps
from mmkv_bench.report.prompts import Prompts
from mmkv_bench.report.answers import COLUMNS, Answers, Values, chosen, of_cell
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.store.blocks import blocks
from mmkv_bench.tables.captions import line_label
from mmkv_bench.tables.rows import AT_ONCE, BASELINE, Rows, context_key, with_limits
from mmkv_bench.tables.score_table import ScoreTable

_PER_CELL = ("status", "error", "answer", "fallback")


@dataclass
class Group:
    """Cells of one context: they answered the same prompts. names: of cells, in the order of the tables, `full` first."""

    name: str
    names: list[str]
    full: str | None


@dataclass(frozen=True)
class Writing:
    """What the scripts of a store are made of, and where they go."""

    folder: Folder
    answers: Answers
    prompts: Prompts


class StoreShown:
    """Writes what one store has to show.

    Args:
        number: of the store in the report; rows, tables: of it.
    """

    def __init__(self, number: int, root: Path, rows: Rows, tables: Sequence[ScoreTable]) -> None:
        self.number, self.root = number, root
        self.cells, self.samples, self.metrics = rows.cells, rows.samples, rows.metrics
        self._described = cell_pages.described(rows.cells)
        self._labels = {
            cell: (line_label(method), budget_words(table.axis, budget))
            for table in tables
            for method in table.methods
            for budget in ("", *table.budgets)
            if (entry := table.entries.get((method.label, budget))) is not None
            for cell in entry.cells
        }
        self._metrics = list(dict.fromkeys(table.metric for table in tables))

    def name(self, cell: str) -> str:
        """What a cell's script and address are called: the number of its store, its hash."""
        return f"{self.number}-{re.sub('[^A-Za-z0-9]', '_', cell)}"

    def label(self, cell: str) -> tuple[str, str]:
        """Method and budget in words, as tables have them."""
        if cell in self._labels:
            return self._labels[cell]
        row = self._described[cell]
        budget = row.get("budget_entries", row.get("budget_fraction"))
        return row["method"], budget_words(row["budget_kind"], "" if budget is None else str(budget))

    def write(self, folder: Folder, commands: Commands, most: int) -> list[str]:
        """Write its scripts; returns sentences on what they leave out.

        Args:
            most: samples of each dataset.
        """
        from mmkv_bench.store.store import Store

        store = Store(self.root)
        prompts = Prompts(folder, {row["prompt_hash"]: row for row in store.prompts().to_pylist()})
        configs, scored = self._configs(folder), cell_pages.scores(self.metrics)
        config_of = dict(zip(self.cells["cell"], self.cells["config"], strict=True))
        said: dict[str, int] = {}
        for block in self._blocks(store.counts("responses")):
            names = [cell for group in block for cell in group.names]
            answers = Answers.of(store.responses(names, COLUMNS, coded=True))
            for group in block:
                samples, total = chosen(answers, group.names, most)
                values = Values(self.samples, group.names, samples)
                told = {cell: of_cell(answers, cell, samples, group.full, values) for cell in group.names}
                for cell in group.names:
                    content = self._of_cell(cell, group, commands, configs[config_of[cell]])
                    content |= {"scores": scored.get(cell, []), "answers": told[cell], **answers.account(cell)}
                    folder.script(f"cells/{self.name(cell)}", content)
                self._samples(Writing(folder, answers, prompts), group, samples, total, told)
                if total > len(samples):
                    said[self._described[group.names[0]]["dataset"]] = total
        return self._left_out(said, most)

    def _blocks(self, answers: Mapping[str, int]) -> Iterator[list[Group]]:
        """Groups whose answers are read together: with texts and lists those of all are more than memory should hold.

        answers: cell -> how many.
        """
        groups = {group.name: group for group in self._groups()}
        rows = {name: sum(answers.get(cell, 0) for cell in group.names) for name, group in groups.items()}
        for block in blocks(groups, rows, AT_ONCE):
            yield [groups[name] for name in block]

    def _left_out(self, said: Mapping[str, int], most: int) -> list[str]:
        if not said:
            return []
        named = ", ".join(f"{dataset} ({total})" for dataset, total in list(said.items())[:8])
        more = f" and {len(said) - 8} more" if len(said) > 8 else ""
        return [
            f"Single samples: the first {most} of each dataset are shown, of {named}{more}; --samples N shows more. All other "
            "numbers are of all samples."
        ]

    def _configs(self, folder: Folder) -> dict[str, tuple[int, str, Any]]:
        """The text of a configuration -> (its number, the name of its script, what it holds)."""
        found: dict[str, tuple[int, str, Any]] = {}
        for text in dict.fromkeys(self.cells["config"]):
            place, content = len(found), cell_pages.parsed(text)
            found[text] = (1_000_000 * self.number + place, f"configs/{self.number}-{place}", content)
            folder.script(found[text][1], content)
        return found

    def _groups(self) -> Iterator[Group]:
        """Cells by context, in the order of the tables' lines; `full` first."""
        cells = with_limits(self.cells)
        order = {cell: place for place, cell in enumerate(self._labels)}
        found: dict[tuple[str, ...], list[str]] = {}
        for row in cells.to_dict("records"):
            found.setdefault(context_key(row), []).append(row["cell"])
        for number, names in enumerate(found.values()):
            names.sort(key=lambda cell: (self._described[cell]["base"] != BASELINE, order.get(cell, len(order)), cell))
            full = names[0] if self._described[names[0]]["base"] == BASELINE else None
            yield Group(f"{self.number}-{number}", names, full)

    def _of_cell(self, cell: str, group: Group, commands: Commands, config: tuple[int, str, Any]) -> dict[str, Any]:
        """What a cell is and how it is made again."""
        number, name, content = config
        row = self._described[cell]
        return {
            "hash": cell,
            "store": self.number,
            "label": ", ".join(filter(None, self.label(cell))),
            "row": row,
            "config": name,
            "command": commands.of(row, number, content),
            "seeds": self._seeds(cell, group.names),
            "group": group.name,
        }

    def _samples(
        self,
        writing: Writing,
        group: Group,
        samples: Sequence[str],
        total: int,
        told: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        """The scripts of a group and of its samples. told: cell -> what it answered to them."""
        hashes = writing.answers.hashes(group.names, samples)
        first = self._described[group.names[0]]
        held = {metric for each in told.values() if each for metric in each["values"]}
        metrics = [metric for metric in self._metrics if metric in held]
        maps = kept_maps(
            writing.answers, group.names, samples, [writing.prompts.visual(hashes.get(sample)) for sample in samples]
        )
        content = {
            **{key: first[key] for key in ("model", "dataset", "protocol")},
            "total": total,
            "metrics": metrics or [""],
            "less_is_better": [metric for metric in metrics if lower_is_better(metric)],
            "cells": [self._of_group(cell, group) for cell in group.names],
            "samples": [
                {"id": sample, **writing.prompts.of(sample, hashes.get(sample)).plain(), "kept": found is not None}
                for sample, found in zip(samples, maps, strict=True)
            ],
        }
        writing.folder.script(f"groups/{group.name}", content)
        every = [told[cell] for cell in group.names]
        for place, found in enumerate(maps):
            writing.folder.script(f"answers/{group.name}-{place}", _of_sample(place, every, metrics))
            if found is not None:
                writing.folder.script(f"kept/{group.name}-{place}", found)

    def _of_group(self, cell: str, group: Group) -> dict[str, Any]:
        label, budget = self.label(cell)
        seed = self._described[cell].get("seed")
        return {"name": self.name(cell), "label": label, "budget": budget, "seed": seed, "full": cell == group.full}

    def _seeds(self, cell: str, among: Sequence[str]) -> list[dict[str, Any]]:
        """The other seeds of the same method at the same budget."""
        if self._described[cell].get("seed") is None:
            return []
        own = [other for other in among if self.label(other) == self.label(cell) and other != cell]
        return [{"name": self.name(other), "seed": self._described[other].get("seed")} for other in own]


def _of_sample(place: int, told: Sequence[Mapping[str, Any] | None], metrics: Sequence[str]) -> dict[str, Any]:
    """What all cells of a group answered to one sample, column by column."""

    def column(name: str) -> list[Any]:
        return [None if each is None or each.get(name) is None else each[name][place] for each in told]

    found: dict[str, Any] = {name: column(name) for name in (*_PER_CELL, "differs", "resident")}
    found["values"] = {
        metric: [(each or {}).get("values", {}).get(metric, [None] * (place + 1))[place] for each in told]
        for metric in metrics
    }
    return found


def budget_words(axis: str, budget: str) -> str:
    """`64 entries`, `20 %`, "" for none."""
    if not budget:
        return ""
    return f"{float(budget) * 100:.4g} %" if axis == "fraction" else f"{budget} entries"

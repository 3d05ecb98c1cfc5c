"""Pages of one store in a report: cells, groups of cells with their samples, and single samples."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from mmkv_bench.report.cells import (
    COLUMNS,
    PROGRAM,
    Answer,
    AnswerTable,
    Commands,
    answer_summary,
    audit_sentences,
    cell_fields,
    compare_with_full,
    first_samples,
    metric_rows,
    sample_scores,
    shown_configuration,
)
from mmkv_bench.report.folder import Folder
from mmkv_bench.report.formatting import Field, budget_words, datatable, interval, score, text_field
from mmkv_bench.report.samples import KeptTokens, Prompts, kept_section
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.store.packing import blocks
from mmkv_bench.store.store import Store
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.stored_rows import AT_ONCE, BASELINE, Rows, context_key, with_limits
from mmkv_bench.tables.text import line_label

_ANSWER_COLUMNS = (
    "cell",
    "sample_id",
    "status",
    "error",
    "answer",
    "fallback",
    "entries_resident",
    "token_ids",
    "prompt_hash",
)


class GroupCell(NamedTuple):
    """A cell as the pages show it. cell: its hash. name: name of its page. label: its method. budget: text, "" for
    none."""

    cell: str
    name: str
    label: str
    budget: str
    seed: int | None

    @property
    def words(self) -> str:
        return ", ".join(filter(None, (self.label, self.budget, "" if self.seed is None else f"seed {self.seed}")))


class CellGroup(NamedTuple):
    """Cells that answered the same prompts under the same conditions, in the order of the tables, `full` first.

    full: hash of the `full` cell, with which the others are compared, or None.
    """

    name: str
    model: str
    dataset: str
    protocol: str
    cells: list[GroupCell]
    full: str | None

    @property
    def hashes(self) -> list[str]:
        return [one.cell for one in self.cells]


class GroupAnswers(NamedTuple):
    """Answers of a group's cells to the samples that the report shows.

    Attributes:
        samples, total: ids of the shown samples, and number of all samples with answers.
        answers: per cell, one row per shown sample.
        metrics: names of the shown metrics.
        full: answers of the `full` cell, or None.
    """

    samples: list[str]
    total: int
    answers: list[list[Answer]]
    metrics: list[str]
    full: list[Answer] | None


class StorePages:
    """Writer of the pages of one store. number: position of the store in the report."""

    def __init__(self, number: int, root: Path, rows: Rows, tables: Sequence[ScoreTable]) -> None:
        self.number, self.root = number, root
        self.cells, self.samples, self.metrics = rows.cells, rows.samples, rows.metrics
        self._described = cell_fields(rows.cells)
        self._labels = {
            cell: (line_label(method), budget_words(table.axis, budget))
            for table in tables
            for method, budget, entry in table.cells
            for cell in entry.cells
        }
        self._metrics = list(dict.fromkeys(table.metric for table in tables))

    def name(self, cell: str) -> str:
        """Return the name of a cell's page: number of the store, and hash."""
        return f"{self.number}-{re.sub('[^A-Za-z0-9]', '_', cell)}"

    def write(
        self, folder: Folder, commands: Commands, most: int, receipts: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Write the pages of the store, and return sentences on the samples that are left out.

        Args:
            folder: folder of the report.
            commands: commands that run cells again.
            most: largest number of samples per dataset.
            receipts: hash of a cell -> its entry in a receipt of `verify`.
        """
        store = Store(self.root)
        for file in {entry["file"]: entry["path"] for entry in receipts.values()}.items():
            folder.write(f"receipts/{file[0]}", file[1].read_bytes())
        prompts = Prompts(folder, {row["prompt_hash"]: row for row in store.prompts().to_pylist()})
        configs, scores = self._configs(folder), metric_rows(self.metrics)
        rows = self._described.values()
        constant_columns = [
            name for name, value in next(iter(rows)).items() if all(row.get(name) == value for row in rows)
        ]
        file_prefix = f"store-{self.number}"
        folder.figure(file_prefix, None, ["column", "value"], self._provenance(self.cells["cell"][0], constant_columns))
        config_of = dict(zip(self.cells["cell"], self.cells["config"], strict=True))
        samples_cut: dict[str, int] = {}
        groups, counts = {group.name: group for group in self._groups()}, store.counts("responses")
        sizes = {name: sum(counts.get(cell, 0) for cell in group.hashes) for name, group in groups.items()}
        for names in blocks(groups, sizes, AT_ONCE):  # all answers with texts and lists would not fit into memory
            block_groups = [groups[name] for name in names]
            cells = [cell for group in block_groups for cell in group.hashes]
            answers = AnswerTable(store.responses(cells, COLUMNS, coded=True))
            for group in block_groups:
                shown_answers = self._group_answers(answers, group, most)
                for place, one in enumerate(group.cells):
                    text, row = config_of[one.cell], self._described[one.cell]
                    label_and_budget = one.label, one.budget
                    others = [
                        other
                        for other in group.cells
                        if other != one and (other.label, other.budget) == label_and_budget
                    ]
                    folder.page(
                        f"cells/{one.name}",
                        "cell.html",
                        title=", ".join(filter(None, (one.label, one.budget))),
                        cell=one.cell,
                        rows=str(self.root),
                        row=row,
                        group=group.name,
                        config=configs[text],
                        command=commands.of({**row, "cell": one.cell}, text),
                        receipt=receipts.get(one.cell),
                        seeds=[] if one.seed is None else [(other.seed, other.name) for other in others],
                        number=place,
                        samples=len(shown_answers.samples)
                        if any(row["status"] for row in shown_answers.answers[place])
                        else 0,
                        scores=list(map(_score_row, scores.get(one.cell, []))),
                        audit=" ".join(audit_sentences(answer_summary(answers.rows(one.cell)))),
                        kept=_heads(answers.kept(one.cell), folder),
                        shared=file_prefix,
                        provenance=[
                            ("cell", one.cell),
                            *self._provenance(one.cell, [n for n in row if n not in constant_columns]),
                        ],
                    )
                self._sample_pages(folder, answers, prompts, group, shown_answers)
                if shown_answers.total > len(shown_answers.samples):
                    samples_cut[group.dataset] = shown_answers.total
        return _cut_samples_sentence(samples_cut, most)

    def _provenance(self, cell: str, names: Sequence[str]) -> list[tuple[str, str]]:
        row = self._described[cell]
        return [(name, str(row[name]).lower() if isinstance(row[name], bool) else str(row[name])) for name in names]

    def _group_answers(self, answers: AnswerTable, group: CellGroup, most: int) -> GroupAnswers:
        samples, total = first_samples(answers, group.hashes, most)
        scores = sample_scores(self.samples, group.hashes, samples)
        rows = [answers.of_samples(cell, samples, _ANSWER_COLUMNS) for cell in group.hashes]
        fulls = rows[0] if group.full else [None] * len(samples)
        cells = [[compare_with_full(*both, scores) for both in zip(answered, fulls, strict=True)] for answered in rows]
        for answered in cells:
            for row, full in zip(answered, fulls, strict=True):
                texts = row["status"], row["error"], row["answer"], row["text_differs"]
                row["markup"] = _markup(*texts, full["answer"] or "" if full else "")
        metric_names = {metric for metrics in scores.values() for metric in metrics}
        return GroupAnswers(
            samples,
            total,
            cells,
            [metric for metric in self._metrics if metric in metric_names],
            cells[0] if group.full else None,
        )

    def _configs(self, folder: Folder) -> dict[str, str]:
        """Write each distinct configuration once. Return configuration (JSON) -> name of its file."""
        config_names = {
            text: f"{self.number}-{place}" for place, text in enumerate(dict.fromkeys(self.cells["config"]))
        }
        for text, name in config_names.items():
            data = json.dumps(shown_configuration(text), ensure_ascii=False, indent=1).encode()
            folder.write(f"configs/{name}.json", data)
        return config_names

    def _groups(self) -> Iterator[CellGroup]:
        """Yield groups of comparable cells (equal `context_key`), in the order of the tables' lines, `full` first."""
        cell_positions = {cell: place for place, cell in enumerate(self._labels)}
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in with_limits(self.cells).to_dict("records"):
            groups.setdefault(context_key(row), []).append(row["cell"])
        for number, cells in enumerate(groups.values()):
            cells.sort(
                key=lambda cell: (
                    self._described[cell]["base"] != BASELINE,
                    cell_positions.get(cell, len(cell_positions)),
                    cell,
                )
            )
            first = self._described[cells[0]]
            yield CellGroup(
                name=f"{self.number}-{number}",
                model=first["model"],
                dataset=first["dataset"],
                protocol=first["protocol"],
                cells=list(map(self._group_cell, cells)),
                full=cells[0] if first["base"] == BASELINE else None,
            )

    def _group_cell(self, cell: str) -> GroupCell:
        row = self._described[cell]
        budget = row.get("budget_entries", row.get("budget_fraction"))
        unlisted_label = row["method"], budget_words(row["budget_kind"], "" if budget is None else str(budget))
        label, budget_text = self._labels.get(cell, unlisted_label)
        return GroupCell(cell, self.name(cell), label, budget_text, row.get("seed"))

    def _sample_pages(
        self, folder: Folder, answers: AnswerTable, prompts: Prompts, group: CellGroup, shown: GroupAnswers
    ) -> None:
        hashes = [
            next((row["prompt_hash"] for row in rows if row["prompt_hash"]), None)
            for rows in zip(*shown.answers, strict=True)
        ]
        sample_prompts = list(map(prompts.of, shown.samples, hashes))
        visual_tokens = list(map(prompts.visual, hashes))
        page_values = {"group": group, "name": group.name, "total": shown.total}
        folder.page(
            f"samples/{group.name}",
            "samples.html",
            **page_values,
            title=f"Samples of {group.dataset}",
            cells=[(place, one.words) for place, one in enumerate(group.cells)],
            metrics=[(metric, metric) for metric in shown.metrics or [""]],
            samples=list(zip(shown.samples, sample_prompts, strict=True)),
            answers=_comparison(shown),
        )
        columns = ["kept_indices", "kept_digest"]
        kept_rows = (
            [answers.of_samples(cell, shown.samples, columns) for cell in group.hashes] if any(visual_tokens) else []
        )
        for place, (sample, prompt) in enumerate(zip(shown.samples, sample_prompts, strict=True)):
            kept = {
                number: tokens
                for number, rows in enumerate(kept_rows)
                if (tokens := KeptTokens.of(rows[place], visual_tokens[place])) is not None
            }
            images = [(f"../{path}", ratio) for path, ratio in zip(prompt.images, prompt.ratios, strict=True)]
            cells = zip(group.hashes, shown.answers, strict=True)
            compressed_cells = [cell for cell, rows in cells if cell != group.full and rows[place]["status"] == "ok"]
            folder.page(
                f"samples/{group.name}-{place}",
                "sample.html",
                **page_values,
                title=sample,
                place=place,
                count=len(shown.samples),
                prompt=prompt,
                table=_answers_table(group, shown, place),
                kept=kept_section(kept, images, group.cells, folder) if kept else None,
                remake=shlex.join([PROGRAM, "show", str(self.root), sample, *compressed_cells[:1], "--remake"]),
            )


def _cut_samples_sentence(cut: Mapping[str, int], most: int) -> list[str]:
    dataset_texts = ", ".join(f"{dataset} ({total})" for dataset, total in list(cut.items())[:8])
    more_text = f" and {len(cut) - 8} more" if len(cut) > 8 else ""
    shown_text = f"Single samples: the first {most} of each dataset are shown, of {dataset_texts}{more_text}"
    return [f"{shown_text}; --samples N shows more. All other numbers are of all samples."] if cut else []


def _score_row(row: Mapping[str, Any]) -> list[Any]:
    difference_fields = row["difference"], interval(row["difference_low"], row["difference_high"])
    lmms_eval_value = row["lmms_eval_reason"] if row["lmms_eval"] is None else row["lmms_eval"]
    shown_value = score(row["value"]) if row["value"] is None else row["value"]
    numbers = [shown_value, interval(row["low"], row["high"]), str(row["n"]), str(row["n_ok"])]
    return [row["metric"], *numbers, *("" if one is None else one for one in (*difference_fields, lmms_eval_value))]


def _heads(kept: Sequence[Any] | None, folder: Folder) -> tuple[str, Sequence[Any]] | None:
    """Return the name of a heat map and its numbers, `AnswerTable.kept`; None without these."""
    if kept is None:
        return None
    decimals = 0 if all(value >= 100 for layer in kept[0] for value in layer) else 1
    kinds = ("mean", "least", "most")
    return folder.heads(len(kept[0]), len(kept[0][0]), "entries", kinds, decimals), kept


@lru_cache(1 << 14)
def _markup(status: str | None, error: str | None, answer: str | None, same: int | None, full: str) -> Markup:
    """Return an answer as HTML. The first `same` characters equal the full cache's answer; the rest is marked."""
    if status is None:
        return Markup('<span class="quiet">no row</span>')
    if status != "ok":
        return Markup('<span class="bad" title="{}">{}</span>').format(error or "", status)
    text = answer or ""
    if same is None:
        return Markup('<span class="answer">{}</span>').format(text)
    marked = Markup('<mark title="full: {}">{}</mark>').format(full, text[same:] or "∅")
    return Markup('<span class="answer">{}{}</span>').format(text[:same], marked)


def _comparison(shown: GroupAnswers) -> dict[str, Any]:
    """Return the data with which the page's script compares cells: answers, failures, first differences, scores."""
    text_numbers: dict[str, int] = {}
    cells = [
        {
            "texts": [text_numbers.setdefault(row["markup"], len(text_numbers)) for row in rows],
            "failed": [int(row["status"] not in (None, "ok")) for row in rows],
            "leaves": [row["differs"] for row in rows],
            "values": {
                metric: [row["scores"].get(metric) for row in rows]
                for metric in shown.metrics
                if any(metric in row["scores"] for row in rows)
            },
        }
        for rows in shown.answers
    ]
    lower_is_better_metrics = [metric for metric in shown.metrics if lower_is_better(metric)]
    return {"cells": cells, "texts": list(text_numbers), "less_is_better": lower_is_better_metrics}


def _answers_table(group: CellGroup, shown: GroupAnswers, place: int) -> Markup:
    """Return the HTML table of all answers of a group to one sample. place: position among the shown samples."""
    columns: dict[str, list[Field]] = {}
    full_answer = None if shown.full is None else shown.full[place]
    for one, answers in zip(group.cells, shown.answers, strict=True):
        row = answers[place]
        if row["status"] is None:
            continue
        differs, resident = row["differs"], row["entries_resident"]
        fields: dict[str, Field] = {
            "cell": text_field(one.name),
            "method": text_field(one.label + ("" if one.seed is None else f", seed {one.seed}")),
            "budget": text_field(one.budget or "-"),
            "answer": text_field(row["answer"], row["markup"]),
            **{metric: (_mark(row["scores"].get(metric)), row["scores"].get(metric)) for metric in shown.metrics},
        }
        if full_answer is not None:
            first_metric = shown.metrics[0] if shown.metrics else ""
            fields["against full"] = text_field(
                "" if row is full_answer else _difference_words(row, full_answer, first_metric)
            )
            token_apart_text = "" if differs is None else "never" if differs < 0 else f"token {differs + 1}"
            fields["leaves full"] = token_apart_text, None if differs is None else differs % 2**31
        fields["entries"] = ("" if resident is None else str(resident)), resident
        fields["remarks"] = text_field("; ".join(row["fallback"] or ()))
        for header, field in fields.items():
            columns.setdefault(header, []).append(field)
    if not any(text for text, _ in columns.get("remarks", ())):
        columns.pop("remarks", None)
    return datatable("answers", columns, ("method", "budget", "against full"), link="../cells/")


@lru_cache(1 << 14)
def _mark(value: float | None) -> str:
    """Return a sample's score as HTML. Right and wrong differ in a sign, not only in colour."""
    if value not in (0, 1):
        return score(value)
    return Markup('<b class="{}">{}</b>').format(*(("good", "✓ 1.000") if value else ("bad", "✗ 0.000")))


def _difference_words(answer: Answer, full: Answer, metric: str) -> str:
    """Return `lower score`, `higher score` or `same score`, and `other words` if the answer's text differs from full's."""
    comparison_words = [] if answer["answer"] == full["answer"] else ["other words"]
    value, full_score = answer["scores"].get(metric), full["scores"].get(metric)
    if value is not None and full_score is not None:
        gain = (value - full_score) * (-1 if lower_is_better(metric) else 1)
        comparison_words.insert(0, "higher score" if gain > 0 else "lower score" if gain < 0 else "same score")
    return ", ".join(comparison_words)

"""Texts that commands print: a run's settings before any work, a run's report at the end, and the output of `mmkv-bench
plan`.

A cell is one row of the result tables: one method at one budget on one dataset (see `plan/cells.py`).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

import pyarrow.compute as pc

from mmkv_bench import devices
from mmkv_bench.families.facts import ModelFacts, kv_bytes_per_token, share_of_all_state
from mmkv_bench.forecast.roofline import weights_text
from mmkv_bench.models.load import LoadedModel, threads_for
from mmkv_bench.plan.identity import UNKNOWN
from mmkv_bench.plan.plan import Coverage, DatasetShare, Plan
from mmkv_bench.protocols import protocol
from mmkv_bench.text_columns import align_columns, size

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.stored_rows import ReadOnce

_INDENT = " " * 11


@dataclass(frozen=True)
class PromptSize:
    """Number of tokens of a dataset's first prompt.

    tokens: all tokens.
    visual_tokens: visual tokens.
    context_tokens: tokens to which the budget applies; fewer than `tokens` under query_agnostic.
    """

    tokens: int
    visual_tokens: int
    context_tokens: int


def card(
    plan: Plan,
    rows_done: Mapping[str, int],
    prompts: Mapping[str, PromptSize] | None = None,
    loaded: LoadedModel | None = None,
    notes: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Return the text that a run prints before any work: model, cache sizes, budgets, datasets and numbers of rows.

    Args:
        rows_done: dataset to number of stored rows.
        prompts: dataset to size of the first prompt, where known.
        loaded: the loaded model, or None if the run loads none.
        notes: further notes, printed after those of the plan.
        width: number of columns at which lines are wrapped; None: no wrapping.
    """
    cells, prompts = plan.cells, prompts or {}
    family, lines = _family(plan), model_lines(plan, loaded)
    first_prompt = next((prompts[part.dataset] for part in plan.parts if part.dataset in prompts), None)
    if first_prompt is not None and family is not None:
        lines += _cache_lines(plan, family, first_prompt)
    protocols, readings, seeds = (
        _distinct_text(getattr(cell, name) for cell in cells) for name in ("protocol", "reading", "seed")
    )
    lines.append(f"methods    {_distinct_text(cell.method for cell in cells)}")
    lines.append(f"protocol   {protocols}; reading {readings or 'none'}{seeds and f'; seed {seeds}'}")
    lines += [
        f"dataset    {_dataset_text(part, rows_done[part.dataset], prompts.get(part.dataset))}" for part in plan.parts
    ]
    lines += row_lines(plan, rows_done, notes)
    return wrapped(lines, width)


def model_lines(plan: Plan, loaded: LoadedModel | None = None) -> list[str]:
    """Return lines about the model: name, weights, and KV cache bytes per token."""
    model, cell, family = plan.model, plan.cells[0], _family(plan)
    loaded_bytes = None if loaded is None else sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    device_clause = "" if loaded is None else f", on {loaded.device}"
    if loaded is not None and devices.at(loaded.device).kind == "cpu":
        threads = threads_for(loaded, model.threads)
        device_clause += f" with {threads} thread{'s' * (threads > 1)}"
    weights = f"{_INDENT}{weights_text(plan, loaded_bytes)}, {cell.dtype}, {model.attention}{device_clause}"
    if family is None:
        return [f"model      {model.name}, whose files are not on this machine", weights]
    heads = f"{family.num_query_heads} query / {family.num_kv_heads} KV heads, head_dim {family.head_dim}"
    return [
        f"model      {model.name} ({family.name}, {cell.model_fingerprint}), {family.all_layers} layers, {heads}",
        weights,
        f"KV cache   {size(kv_bytes_per_token(family, cell.dtype))} per token",
        *_uncompressed_layers_line(family),
    ]


def _uncompressed_layers_line(family: ModelFacts) -> list[str]:
    """Return a line about the model's layers that are not compressed, if there are any."""
    states = family.states
    layer_kinds = [
        *([f"{states.windows} with a window of {states.window} entries"] if states.windows else []),
        *([f"{states.linear} with a recurrent state"] if states.linear else []),
        *([f"{states.readers} that read another layer's entries"] if states.readers else []),
    ]
    return [f"beside     {' and '.join(layer_kinds)}, which are not compressed"] if layer_kinds else []


def row_lines(plan: Plan, rows_done: Mapping[str, int], notes: Sequence[str] = ()) -> list[str]:
    """Return lines with the numbers of all, stored and missing rows, then notes. rows_done: dataset to stored rows."""
    rows, done = sum(len(part.samples) * len(part.cells) for part in plan.parts), sum(rows_done.values())
    missing_text = f"{rows - done} to make" if done < rows else "nothing to generate"
    shard = plan.answering.selection.shard
    shard = "" if shard == "0/1" else f", shard {shard}"
    return [
        f"rows       {rows} rows, {done} done, {missing_text}{shard}, in {plan.out}",
        *(f"note       {note}" for note in (*plan.notes, *notes)),
    ]


def wrapped(lines: Sequence[str], width: int | None) -> str:
    """Join lines, wrapped at `width` columns with indented continuation lines. None: no wrapping."""
    if width is not None:
        line_width = max(width, 2 * len(_INDENT))
        options = {"subsequent_indent": _INDENT, "break_long_words": False, "break_on_hyphens": False}
        lines = [row for line in lines for row in wrap(line, line_width, **options)]  # type: ignore[arg-type]
    return "\n".join(lines)


def columns(stream: TextIO) -> int | None:
    """Return the width of a terminal in columns; None for other streams."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _family(plan: Plan) -> ModelFacts | None:
    return None if plan.cells[0].dtype == UNKNOWN else plan.family


def _distinct_text(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _cache_lines(plan: Plan, family: ModelFacts, prompt: PromptSize) -> list[str]:
    """Return lines with the KV cache bytes of the first prompt: of the full cache, and at each budget."""
    per_token, length = kv_bytes_per_token(family, plan.cells[0].dtype), prompt.context_tokens
    full_size = size(prompt.tokens * per_token)
    lines = [
        f"full       {prompt.tokens} tokens ({prompt.visual_tokens} visual) in the first prompt: {full_size} cache"
    ]
    for budget in dict.fromkeys(cell.budget for cell in plan.cells if cell.budget is not None):
        budget_entries = budget.entries_for(length)
        kept_entries = min(budget_entries, length)
        bytes_clause = f" ({budget.in_bytes} of all state)" if budget.in_bytes else ""
        state_clause = ""
        if family.states.layers:  # layers that are not compressed
            share = share_of_all_state(family, length, kept_entries, plan.cells[0].dtype)
            state_clause = f" in {family.num_layers} of {family.all_layers} layers, {100 * share:.1f}% of all state"
        lines.append(
            f"budget     {budget}{bytes_clause}: {kept_entries} of {length} entries per KV head "
            f"({100 * kept_entries / length:.1f}%), "
            f"{kept_entries * family.num_layers * family.num_kv_heads} in all, {size(kept_entries * per_token)}"
            + state_clause
            + ("; the first prompt is kept whole" if budget_entries >= length else "")
        )
    return lines


def _dataset_text(part: DatasetShare, done: int, prompt: PromptSize | None) -> str:
    samples, cells = len(part.samples), len(part.cells)
    prompt_clause = "" if prompt is None else f", first prompt {prompt.tokens} tokens"
    return f"{part.dataset}: {samples} samples x {cells} cells{prompt_clause}" + (
        f", {done} of {samples * cells} rows there already" if done else ""
    )


# ---------------------------------------------------------------------- the schedule of `mmkv-bench plan`
_HEADINGS = ("method", "reading", "budgets", "seeds", "protocols", "cells", "rows", "done", "failed", "missing")
_SOURCE_NOTES = {"documented": " as documented", "unknown": ", an unknown number"}


def schedule(plan: Plan, coverage: Coverage) -> str:
    """Return the text of `mmkv-bench plan`: lines about the model, then tables of cells and rows.

    Datasets with equal tables share one table. coverage: which rows of the plan are stored.
    """
    done_by_dataset = {part.dataset: coverage.count(part) for part in plan.parts}
    tables: dict[tuple[str, tuple[tuple[str, ...], ...]], list[str]] = {}
    for part in plan.parts:
        source_note, missing = _SOURCE_NOTES.get(part.counted, ""), coverage.missing(part)
        samples = f"{len(part.samples)} samples{source_note}, {missing} with missing answers"
        tables.setdefault((samples, _method_lines(part, coverage)), []).append(part.dataset)
    lines = [wrapped([*model_lines(plan), *row_lines(plan, done_by_dataset)], columns(sys.stdout))]
    for (samples, methods), datasets in tables.items():
        each_word = "each " if len(datasets) > 1 else ""
        table = align_columns(_HEADINGS, methods, words=_HEADINGS.index("cells"))
        lines += ["", f"{', '.join(datasets)}: {each_word}{samples}", *table]
    return "\n".join(lines)


def schedule_document(plan: Plan, coverage: Coverage) -> dict[str, Any]:
    """Return the content of `schedule` as data for JSON, with one entry per cell."""
    return {
        "out": str(plan.out),
        "model": plan.model.name,
        "notes": list(plan.notes),
        "datasets": [_counts(part, coverage) for part in plan.parts],
    }


def _counts(part: DatasetShare, coverage: Coverage) -> dict[str, Any]:
    answered, statuses = coverage.answered(part), coverage.statuses(part)
    cells = zip(part.cells, answered.sum(1).tolist(), (statuses > 0).sum(1).tolist(), strict=True)
    return {
        "dataset": part.dataset,
        "samples": len(part.samples),
        "counted": part.counted,
        "missing": coverage.missing(part),
        "cells": [
            {"cell": cell.cell, "label": cell.label, "done": done, "failed": failed} for cell, done, failed in cells
        ],
    }


def _method_lines(part: DatasetShare, coverage: Coverage) -> tuple[tuple[str, ...], ...]:
    """Return a dataset's table: one line per method and reading, with numbers of cells and rows.

    The reading of a method says whether it follows its paper's text or its released code.
    """
    answered, statuses = coverage.answered(part), coverage.statuses(part)
    places_by_method: dict[tuple[str, str | None], list[int]] = {}
    for place, cell in enumerate(part.cells):
        places_by_method.setdefault((cell.method, cell.reading), []).append(place)
    lines = []
    for (method, reading), places in places_by_method.items():
        cells = [part.cells[place] for place in places]
        done_rows, failed_rows = int(answered[places].sum()), int((statuses[places] > 0).sum())
        rows = len(cells) * len(part.samples)
        varied_settings = (
            _distinct_text(getattr(cell, name) for cell in cells) or "-" for name in ("budget", "seed", "protocol")
        )
        lines.append(
            (
                method,
                reading or "-",
                *varied_settings,
                *map(str, (len(cells), rows, done_rows, failed_rows, rows - done_rows)),
            )
        )
    return tuple(lines)


# ---------------------------------------------------------------------- the report
STOPPED = " stopped: "  # between a dataset and the reason why it was not finished
MEASURE_METRICS = {"ppl": "ppl", "self_rouge": "rouge_l_sampled", "continuation": "ppl"}
"""Measure of a dataset to the metric that has values only if the measure was taken."""

FIDELITY_METRICS = {"fidelity_kl_all", "fidelity_kl_first"}
"""Metrics of fidelity. A protocol has one of them."""


class Report:
    """The text that a run prints at the end: tables, notes and failures, and with `json=true` a JSON document.

    coverage: which rows of the plan are stored.
    rows: the stored rows of the plan's cells.
    """

    def __init__(self, plan: Plan, store: Store, coverage: Coverage, rows: ReadOnce):
        self.plan, self.store, self.coverage, self.rows = plan, store, coverage, rows
        self.cells, self.parts = plan.cells, plan.parts
        self.metrics: list[dict[str, Any]] = rows.metrics.to_pylist()

    def close(
        self,
        generated: Mapping[str, int],
        scored: int,
        failed: int,
        seconds: float,
        judge: str | None = None,
        stopped: Mapping[str, str] | None = None,
    ) -> None:
        """Print the report.

        Args:
            generated: dataset to number of samples that this run had to answer.
            scored: number of cells that this run scored.
            failed: number of the plan's rows that are failures.
            seconds: duration of the run.
            judge: a line about the judge.
            stopped: dataset (`scoring <dataset>` for a failed scorer) to the reason why it is unfinished.
        """
        if not any(generated.values()) and not scored and not stopped:
            print(self._nothing_done_text())
        with_scores = self.plan.stage != "generate" and (self.metrics or any(part.samples for part in self.parts))
        if with_scores:
            print(self._tables())
            for note in (*self._renamed_method_notes(), *self._further_samples_note(), *self._missing_measures_note()):
                print(note)
        has_weights, command = self.plan.model.weights != "random", f"python -m mmkv_bench tables {self.store.root}"
        if has_weights and any(row["metric"] == "fidelity_kl" for row in self.metrics):
            print(f"fidelity to full's answers: {command} --metric fidelity")
        if self.metrics and any(part.about.get("groups") for part in self.parts):
            print(f"means over the groups of these datasets: {command} --groups")
        print(
            f"rows: {self.store.root}" + f"   ({command} prints the tables again)" * bool(with_scores and has_weights)
        )
        if judge:
            print(judge)
        if failed:
            print(f"{failed} rows failed{self._failure_clause()}; retry=[oom,timeout,nan,error] runs them again")
        for label, why in (stopped or {}).items():
            print(f"{label}{STOPPED}{why}")
        if self.plan.json:
            has_failures = bool(failed or stopped)
            document = {
                "status": "failed" if has_failures else "ok",
                "exit_code": int(has_failures),
                "stopped": dict(stopped or {}),
                "rows": str(self.store.root),
                "cells": len(self.cells),
                "generated": dict(generated),
                "scored": scored,
                "failed": failed,
                "seconds": round(seconds, 3),
                "metrics": list(self.metrics),
            }
            sys.stdout.flush()
            print(json.dumps(document, default=str))

    def _renamed_method_notes(self) -> list[str]:
        """Return a note per method whose rows an earlier run stored under another name."""
        stored_methods = dict(zip(*map(self.rows.cells.get, ("cell", "method")), strict=True))
        method_and_stored_name = {
            (cell.method, stored_methods.get(cell.cell, cell.method)): None for cell in self.cells
        }
        return [
            f"note: {asked} is stored in these rows as {known}, the name that an earlier run gave the same cells; "
            f"the command tables prints {known}"
            for asked, known in method_and_stored_name
            if asked != known
        ]

    def _failure_clause(self) -> str:
        """Return a clause with the most frequent failure, and the number of its rows if there are others."""
        rows = self.store.responses([cell.cell for cell in self.cells], ("status", "error"))
        failures = rows.filter(pc.not_equal(rows["status"], "ok")).to_pylist()
        reasons = Counter(f"{row['status']}: {(row['error'] or 'no reason given').splitlines()[0]}" for row in failures)
        if not reasons:
            return ""
        (reason, rows_with_reason), *other_reasons = reasons.most_common()
        return f", {rows_with_reason} of them with {reason}" if other_reasons else f" with {reason}"

    def _nothing_done_text(self) -> str:
        if not any(part.samples for part in self.parts):
            return f"Nothing to do: no sample of this run belongs to shard {self.plan.answering.selection.shard}."
        if self.plan.stage == "generate":
            return "Nothing to do: every cell has every sample."
        all_coverage = Coverage(self.coverage.rows)  # ignoring `retry`
        if any(all_coverage.missing(part) for part in self.parts):
            return "Nothing to score: all stored answers are scored, but some samples have no answer."
        return "Nothing to do: every cell has every sample, and all answers are scored."

    def _further_samples_note(self) -> list[str]:
        """Return a note if the tables have more samples than this run's limit and shard, else nothing."""
        samples_by_dataset = {part.dataset: len(part.samples) for part in self.parts}
        larger_counts = {
            row["dataset"]: row["n"] for row in self.metrics if row["n"] > samples_by_dataset[row["dataset"]]
        }
        clauses = [
            f"{name} {n} samples, but this run asked for {samples_by_dataset[name]}"
            for name, n in sorted(larger_counts.items())
        ]
        return [f"note: the tables cover all stored samples: {'; '.join(clauses)}"] if clauses else []

    def _missing_measures_note(self) -> list[str]:
        """Return a note if stored answers lack measures of this run, which only generation can take; else nothing."""
        if not self.plan.answering.shares_prefill:
            return []
        metrics_by_measure: dict[str, dict[str, set[str]]] = {}
        for part in self.parts:
            measurable_cells = [cell for cell in part.cells if not protocol(cell.protocol).apart]
            metrics_of_measure = {"fidelity": FIDELITY_METRICS} if self.plan.answering.fidelity else {}
            metrics_of_measure |= {measure: {MEASURE_METRICS[measure]} for measure in part.spec.measures}
            for measure, metrics in metrics_of_measure.items():
                metrics_by_measure.setdefault(measure, {}).update((cell.cell, metrics) for cell in measurable_cells)
        short_cells = {
            cell for metrics_of in metrics_by_measure.values() for cell in self._cells_lacking_values(metrics_of)
        }
        if not short_cells:
            return []
        ok_answers_by_cell = self.coverage.ok(short_cells & {row["cell"] for row in self.metrics})
        clauses = []
        for measure, metrics_of in metrics_by_measure.items():
            cells = {cell: metrics for cell, metrics in metrics_of.items() if cell in ok_answers_by_cell}
            cells = {cell: cells[cell] for cell in self._cells_lacking_values(cells)}
            measured_answers = sum(row["n_ok"] for row in self.metrics if row["metric"] in cells.get(row["cell"], ()))
            ok_answers = sum(ok_answers_by_cell[cell] for cell in cells)
            if lacking_answers := ok_answers - measured_answers:
                clauses.append(f"{measure} ({lacking_answers} of {ok_answers} answers)")
        return (
            [f"note: answers lack {', '.join(clauses)}; a run with out=<another folder> measures them"]
            if clauses
            else []
        )

    def _cells_lacking_values(self, metrics_of: Mapping[str, set[str]]) -> list[str]:
        """Return the cells in `metrics_of` none of whose metrics there has a value for every sample."""
        complete_cells = {
            row["cell"]
            for row in self.metrics
            if row["metric"] in metrics_of.get(row["cell"], ()) and row["n_ok"] == row["n"]
        }
        return [cell for cell in metrics_of if cell not in complete_cells]

    def _tables(self) -> str:
        """Return the score tables of this run's cells as text, without scores per kind of question."""
        from mmkv_bench.tables.build import RANDOM, build
        from mmkv_bench.tables.formats import markdown
        from mmkv_bench.tables.score_text import tables_of_scores
        from mmkv_bench.tables.stored_rows import frames

        if self.plan.model.weights == "random":
            return RANDOM
        specs = [part.spec for part in self.parts]
        headlines = {metric for spec in specs for metric in spec.metrics}
        rows = frames(self.rows.of_metrics(headlines))
        # An earlier run may have stored a cell under another name.
        method_by_cell = {cell.cell: cell.method for cell in self.cells}
        rows = replace(rows, cells=rows.cells.assign(method=rows.cells["cell"].map(method_by_cell)))
        shown_metrics = sorted(headlines.intersection(rows.names)) if all(spec.metrics for spec in specs) else None
        return markdown(tables_of_scores(build(rows, metrics=shown_metrics)))

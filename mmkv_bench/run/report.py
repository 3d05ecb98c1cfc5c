"""The report at a run's end: tables, the rows' folder, failures, and one JSON document."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from mmkv_bench.plan.plan import Coverage, Plan
from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.rows import ReadOnce

STOPPED = " stopped: "  # between a dataset and the reason why it was not finished
MEASURE_METRICS = {"ppl": "ppl", "self_rouge": "rouge_l_sampled", "continuation": "ppl"}
"""For each measure of a dataset, the metric that shows whether it was taken."""

FIDELITY_METRICS = {"fidelity_kl_all", "fidelity_kl_first"}
"""Metrics of which one, depending on the protocol, shows whether fidelity was measured."""


class Report:
    """The report of one run.

    Args:
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
            generated: dataset to number of samples answered by this run.
            scored: number of cells scored by this run.
            failed: number of the run's rows that are failures.
            seconds: duration of the run.
            judge: a line about the judge.
            stopped: dataset to the reason why it was not finished.
        """
        if not any(generated.values()) and not scored and not stopped:
            print(self._idle())
        with_scores = self.plan.stage != "generate" and (self.metrics or any(part.samples for part in self.parts))
        if with_scores:
            print(self._tables())
            for note in (*self._other_names(), *self._more(), *self._unmeasured()):
                print(note)
        trained, command = self.plan.model.weights != "random", f"python -m mmkv_bench tables {self.store.root}"
        if trained and any(row["metric"] == "fidelity_kl" for row in self.metrics):
            print(f"fidelity to full's answers: {command} --metric fidelity")
        if self.metrics and any(part.about.get("groups") for part in self.parts):
            print(f"means over the groups of these datasets: {command} --groups")
        print(f"rows: {self.store.root}" + f"   ({command} prints the tables again)" * bool(with_scores and trained))
        if judge:
            print(judge)
        if failed:
            print(f"{failed} rows failed{self._reason()}; retry=[oom,timeout,nan,error] runs them again")
        for label, why in (stopped or {}).items():
            print(f"{label}{STOPPED}{why}")
        if self.plan.json:
            bad = bool(failed or stopped)
            document = {
                "status": "failed" if bad else "ok",
                "exit_code": int(bad),
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

    def _other_names(self) -> list[str]:
        """Return a sentence for each method whose cells an earlier run stored under another name."""
        stored = dict(zip(*map(self.rows.cells.get, ("cell", "method")), strict=True))
        names = {(cell.method, stored.get(cell.cell, cell.method)): None for cell in self.cells}
        return [
            f"note: {asked} is stored in these rows as {known}, the name that an earlier run gave the same cells; "
            f"the command tables prints {known}"
            for asked, known in names
            if asked != known
        ]

    def _reason(self) -> str:
        """Return the most frequent failure as text, with its number of rows."""
        rows = self.store.responses([cell.cell for cell in self.cells], ("status", "error"))
        failures = rows.filter(pc.not_equal(rows["status"], "ok")).to_pylist()
        reasons = Counter(f"{row['status']}: {(row['error'] or 'no reason given').splitlines()[0]}" for row in failures)
        if not reasons:
            return ""
        (reason, count), *others = reasons.most_common()
        return f", {count} of them with {reason}" if others else f" with {reason}"

    def _idle(self) -> str:
        if not any(part.samples for part in self.parts):
            return f"Nothing to do: no sample of this run belongs to shard {self.plan.answering.selection.shard}."
        if self.plan.stage == "generate":
            return "Nothing to do: every cell has every sample."
        answered = Coverage(self.coverage.rows)  # ignoring `retry`
        if any(answered.missing(part) for part in self.parts):
            return "Nothing to score: all stored answers are scored, but some samples have no answer."
        return "Nothing to do: every cell has every sample, and all answers are scored."

    def _more(self) -> list[str]:
        """Return a sentence if the tables cover samples that this run did not ask for (a smaller limit, one shard)."""
        asked = {part.dataset: len(part.samples) for part in self.parts}
        larger = {row["dataset"]: row["n"] for row in self.metrics if row["n"] > asked[row["dataset"]]}
        parts = [f"{name} {n} samples, but this run asked for {asked[name]}" for name, n in sorted(larger.items())]
        return [f"note: the tables cover all stored samples: {'; '.join(parts)}"] if parts else []

    def _unmeasured(self) -> list[str]:
        """Return a sentence if stored answers lack measures that this run asks for, because measures are taken only while
        answering."""
        if not self.plan.answering.shares_prefill:
            return []
        wanted: dict[str, dict[str, set[str]]] = {}
        for part in self.parts:
            measured = [cell for cell in part.cells if not protocol(cell.protocol).apart]
            asked = {"fidelity": FIDELITY_METRICS} if self.plan.answering.fidelity else {}
            asked |= {measure: {MEASURE_METRICS[measure]} for measure in part.spec.measures}
            for measure, metrics in asked.items():
                wanted.setdefault(measure, {}).update((cell.cell, metrics) for cell in measured)
        suspects = {cell for metrics_of in wanted.values() for cell in self._short(metrics_of)}
        if not suspects:
            return []
        answered = self.coverage.ok(suspects & {row["cell"] for row in self.metrics})
        found = []
        for measure, metrics_of in wanted.items():
            cells = {cell: metrics for cell, metrics in metrics_of.items() if cell in answered}
            cells = {cell: cells[cell] for cell in self._short(cells)}
            valued = sum(row["n_ok"] for row in self.metrics if row["metric"] in cells.get(row["cell"], ()))
            total = sum(answered[cell] for cell in cells)
            if lacking := total - valued:
                found.append(f"{measure} ({lacking} of {total} answers)")
        return (
            [f"note: answers lack {', '.join(found)}; a run with out=<another folder> measures them"] if found else []
        )

    def _short(self, metrics_of: Mapping[str, set[str]]) -> list[str]:
        """Return the cells in which no metric of a measure has a value for every sample. metrics_of: cell to metrics."""
        whole = {
            row["cell"]
            for row in self.metrics
            if row["metric"] in metrics_of.get(row["cell"], ()) and row["n_ok"] == row["n"]
        }
        return [cell for cell in metrics_of if cell not in whole]

    def _tables(self) -> str:
        """Return tables of this run's cells. Scores per kind of question are left out; rows have them."""
        from mmkv_bench.tables.build import RANDOM, build
        from mmkv_bench.tables.formats import markdown
        from mmkv_bench.tables.rows import frames
        from mmkv_bench.tables.score_text import tables_of_scores

        if self.plan.model.weights == "random":
            return RANDOM
        specs = [part.spec for part in self.parts]
        headlines = {metric for spec in specs for metric in spec.metrics}
        rows = frames(self.rows.of_metrics(headlines))
        asked = {
            cell.cell: cell.method for cell in self.cells
        }  # an earlier run may have stored a cell under another name
        rows = replace(rows, cells=rows.cells.assign(method=rows.cells["cell"].map(asked)))
        shown = sorted(headlines.intersection(rows.names)) if all(spec.metrics for spec in specs) else None
        return markdown(tables_of_scores(build(rows, metrics=shown)))

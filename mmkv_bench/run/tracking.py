"""Reports to Weights & Biases: a run's settings, running means, and a final summary of the result folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import Logger, as_list
from mmkv_bench.store.tracking import RunningMeans, WandbTracker, show_summary

if TYPE_CHECKING:
    from mmkv_bench.evaluation.grader import RunningScores
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.plan import Coverage, DatasetShare
    from mmkv_bench.store.store import Store


def tracker(logger: Logger, shard: str, store: Store) -> WandbTracker:
    """Return the Weights & Biases tracker of this process (`shard`). Raises the errors of `WandbTracker`."""
    name = shard.replace("/", "of")
    return WandbTracker(store.root, logger.mode, logger.project, logger.entity, run=logger.name, shard=name)


def flat_config(resolved: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """Return a configuration as flat keys (lists joined by commas), with the whole configuration under `run`."""
    return {
        "model": str(resolved["model"]["name"]),
        "weights": str(resolved["model"]["weights"]),
        "dtype": cells[0].dtype,
        "attention": str(resolved["model"]["attention"]),
        "dataset": _joined(cell.dataset for cell in cells),
        "method": _joined(cell.method for cell in cells),
        "budget": _joined(cell.budget for cell in cells if cell.budget is not None),
        **{key: _joined(as_list(resolved[key])) for key in ("protocol", "reading", "seed")},
        "limit": resolved["limit"],
        **{key: str(resolved[key]) for key in ("sharing", "decode", "scenario", "shard")},
        "cells": len(cells),
        "run": dict(resolved),
    }


def _joined(values: Iterable[Any]) -> str:
    return ",".join(dict.fromkeys(map(str, values)))


_SUMMARY_KEYS = ("model", "dtype", "attention", "device", "dataset", "method", "budget", "protocol", "reading", "seed")
"""Configuration keys of a summary. Their values come from rows, because several runs may have made the rows."""


def summarise(logger: Logger, shard: str, store: Store, worked: bool) -> None:
    """Send the results of all rows of the result folder as one summary.

    worked: whether this run generated or scored something. Otherwise only a folder with wandb runs gets a summary.
    """
    if not (worked or (store.root / "wandb").is_dir()):
        return
    from mmkv_bench.tables.tracker_rows import tracked_rows

    lines = tracked_rows(store)
    common_settings = {key: _joined(line[key] for line in lines if line[key] is not None) for key in _SUMMARY_KEYS}
    show_summary(tracker(logger, shard, store), common_settings, lines, logger.cells)


_GROUP_COLUMNS = ("prefill_s", "decode_s", "n_tokens")
_OWN_COLUMNS = ("ttft_s", "tpot_s")
_PEAK_COLUMNS = ("peak_device_bytes", "peak_resident_bytes")
REPORT_INTERVAL_S = 10.0
"""Least seconds between two reports of numbers per cell, which are hundreds."""
SCORING_FACTOR = 20.0
"""A report waits this many times the duration of the last running scores, which so take at most a twentieth of the
time."""

log = logging.getLogger(__name__)


class DatasetTracker:
    """Sends the running numbers of one dataset to a tracker. A cell is one method at one budget.

    Keys under `<dataset>/`: means over this process's samples (a sample's value is the mean over its cells), the mean
    number of failed rows per sample, and the largest memory peaks.

    Keys under `<dataset>/<cell>/`: `answers` and `failures` in the store, and mean metrics of this process's answers. A
    cell with its own prefill also has mean `ttft_s` and `tpot_s` and the largest memory peaks; times of a shared
    prefill belong to no single cell.

    Args:
        coverage: which rows were stored when the run began.
        todo: number of samples with missing answers.
        scores: scorer of single answers; None sends no scores.
    """

    def __init__(
        self,
        part: DatasetShare,
        coverage: Coverage,
        todo: int,
        track: WandbTracker,
        scores: RunningScores | None = None,
    ) -> None:
        self._track, self._dataset, self._left = track, part.dataset, todo
        self._labels = {cell.cell: f"{part.dataset}/{cell.label}" for cell in part.cells}
        answered, statuses = coverage.answered(part), coverage.statuses(part)
        self._cells: dict[str, float] = {}
        for place, cell in enumerate(part.cells):
            label = self._labels[cell.cell]
            self._cells[f"{label}/answers"] = int(answered[place].sum())
            self._cells[f"{label}/failures"] = int((answered[place] & (statuses[place] > 0)).sum())
        self._means, self._own, self._next = RunningMeans(), RunningMeans(), 0.0
        self._scores, self._sums = scores, dict[str, tuple[float, int]]()
        self._unscored: list[tuple[str, int, str]] = []
        self._largest: dict[str, float] = {}
        self._new = False

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a sample's rows and send the new numbers, those per cell from time to time and with the last sample."""
        values: dict[str, float | None] = {f"{self._dataset}/{name}": _mean(rows, name) for name in _GROUP_COLUMNS}
        values[f"{self._dataset}/failed"] = sum(row["status"] != "ok" for row in rows)
        for row in rows:
            self._add_cell(row)
        self._new = True
        for row in rows:
            _add_peaks(self._largest, self._dataset, row)
        shown_values = {**self._means.add(values), **self._largest}
        self._left -= 1
        report_start = time.monotonic()
        if report_start >= self._next or self._left <= 0:
            self._score()
            report_end = time.monotonic()
            self._next = report_end + max(REPORT_INTERVAL_S, SCORING_FACTOR * (report_end - report_start))
            shown_values |= self._cells
        self._track.log(shown_values)

    def close(self) -> None:
        """Send the numbers per cell if there are new ones since the last report."""
        if self._new:
            self._score()
            self._track.log(self._cells)

    def _score(self) -> None:
        """Score the answers since the last call. If the scorer fails, log a warning and score no further answers."""
        self._new = False
        unscored_answers, self._unscored = self._unscored, []
        if self._scores is None or not unscored_answers:
            return
        distinct_answers = list(dict.fromkeys((doc_id, text) for _, doc_id, text in unscored_answers))
        scores = None
        try:
            scores = self._scores.of(distinct_answers)
        except Exception as error:  # noqa: BLE001 - the score stage will fail in the same way and report it
            log.warning("%s: no running scores: %s", self._dataset, error)
        if scores is None:
            self._scores = None
            return
        scores_of = dict(zip(distinct_answers, scores, strict=True))
        for label, doc_id, text in unscored_answers:
            for metric, value in scores_of[doc_id, text].items():
                name = f"{label}/{metric}"
                sum_so_far, values_so_far = self._sums.get(name, (0.0, 0))
                self._sums[name] = sum_so_far + value, values_so_far + 1
                self._cells[name] = (sum_so_far + value) / (values_so_far + 1)

    def _add_cell(self, row: Mapping[str, Any]) -> None:
        label = self._labels[row["cell"]]
        self._cells[f"{label}/answers"] += 1
        self._cells[f"{label}/failures"] += row["status"] != "ok"
        if row["status"] == "ok" and self._scores is not None:
            self._unscored.append((label, row["doc_id"], row["answer"]))
        if row["measured"] != "own" or row["status"] != "ok":
            return
        own_values = {f"{label}/{name}": row.get(name) for name in _OWN_COLUMNS}
        means = self._own.add(own_values)
        self._cells |= {name: means[name] for name in own_values if name in means}
        _add_peaks(self._cells, label, row)


def _add_peaks(largest: dict[str, float], label: str, row: Mapping[str, Any]) -> None:
    for name in _PEAK_COLUMNS:
        if row.get(name) is not None:
            key = f"{label}/{name}"
            largest[key] = max(largest.get(key, 0), row[name])


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None

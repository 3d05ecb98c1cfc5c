"""Tracking of a run: its configuration, running means per sample, and a final summary of all rows of its folder."""

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
    """Return the tracker of `logger=wandb` for this process's shard of a run. Raises the errors of `WandbTracker`."""
    name = shard.replace("/", "of")
    return WandbTracker(store.root, logger.mode, logger.project, logger.entity, run=logger.name, shard=name)


def described(resolved: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """Return a resolved configuration for display: flat keys to filter by, lists joined by commas, and the whole configuration
    under the key `run`."""
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


_SUMMARY = ("model", "dtype", "attention", "device", "dataset", "method", "budget", "protocol", "reading", "seed")
"""Keys of a summary's configuration. They come from rows and not from a run, because several runs may have made the rows."""


def summarise(logger: Logger, shard: str, store: Store, worked: bool) -> None:
    """Show the results of all rows in the folder as one summary, shared by all runs, processes and attempts.

    worked: whether this run generated or scored something. If not, nothing is written unless a summary exists.
    """
    if not (worked or (store.root / "wandb").is_dir()):
        return
    from mmkv_bench.tables.tracker_rows import tracked_rows

    lines = tracked_rows(store)
    about = {key: _joined(line[key] for line in lines if line[key] is not None) for key in _SUMMARY}
    show_summary(tracker(logger, shard, store), about, lines, logger.cells)


_GROUP = ("prefill_s", "decode_s", "n_tokens")
_OWN = ("ttft_s", "tpot_s")
_PEAKS = ("peak_device_bytes", "peak_resident_bytes")
EVERY = 10.0
"""Seconds between two reports of single cells, which have hundreds of numbers."""
SCORING = 20.0
"""The next report waits this many times the duration of the last running scores, so that they take a twentieth of a run at
most."""

log = logging.getLogger(__name__)


class DatasetTracker:
    """The numbers of one dataset that a tracker shows while the run works.

    Keys under the dataset's name: each sample's means over all cells, and the largest memory peak of a shared prefill. Keys under
    `<dataset>/<cell>/`: `answers` and `failures` in the store, the dataset's metrics as means over this process's answers, and
    for a cell that shared no prefill (column `measured`: own) means of `ttft_s` and `tpot_s` and the largest memory peak. Times
    of a shared run belong to no single cell and are not shown under a cell.

    Args:
        coverage: the stored rows when the run began.
        todo: number of samples that this process will answer.
        scores: scores of single answers; None shows no scores.
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
        """Add one sample's rows. Numbers per cell are sent from time to time, and with the last sample."""
        values: dict[str, float | None] = {f"{self._dataset}/{name}": _mean(rows, name) for name in _GROUP}
        values[f"{self._dataset}/failed"] = sum(row["status"] != "ok" for row in rows)
        for row in rows:
            self._add_cell(row)
        self._new = True
        for row in rows:
            _add_peaks(self._largest, self._dataset, row)
        shown = {**self._means.add(values), **self._largest}
        self._left -= 1
        now = time.monotonic()
        if now >= self._next or self._left <= 0:
            self._score()
            ended = time.monotonic()
            self._next = ended + max(EVERY, SCORING * (ended - now))
            shown |= self._cells
        self._track.log(shown)

    def close(self) -> None:
        """Report the answers since the last report. There are some if another process had the last samples."""
        if self._new:
            self._score()
            self._track.log(self._cells)

    def _score(self) -> None:
        """Score the answers since the last report. If the scorer fails, only the running scores end."""
        self._new = False
        waiting, self._unscored = self._unscored, []
        if self._scores is None or not waiting:
            return
        distinct = list(dict.fromkeys((doc_id, text) for _, doc_id, text in waiting))
        scores = None
        try:
            scores = self._scores.of(distinct)
        except Exception as error:  # noqa: BLE001 - the score stage will fail in the same way and report it
            log.warning("%s: no running scores: %s", self._dataset, error)
        if scores is None:
            self._scores = None
            return
        scores_of = dict(zip(distinct, scores, strict=True))
        for label, doc_id, text in waiting:
            for metric, value in scores_of[doc_id, text].items():
                name = f"{label}/{metric}"
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
                self._cells[name] = (total + value) / (count + 1)

    def _add_cell(self, row: Mapping[str, Any]) -> None:
        label = self._labels[row["cell"]]
        self._cells[f"{label}/answers"] += 1
        self._cells[f"{label}/failures"] += row["status"] != "ok"
        if row["status"] == "ok" and self._scores is not None:
            self._unscored.append((label, row["doc_id"], row["answer"]))
        if row["measured"] != "own" or row["status"] != "ok":
            return
        own = {f"{label}/{name}": row.get(name) for name in _OWN}
        means = self._own.add(own)
        self._cells |= {name: means[name] for name in own if name in means}
        _add_peaks(self._cells, label, row)


def _add_peaks(largest: dict[str, float], label: str, row: Mapping[str, Any]) -> None:
    """Update `<label>/<peak>` with a row's memory peaks."""
    for name in _PEAKS:
        if row.get(name) is not None:
            key = f"{label}/{name}"
            largest[key] = max(largest.get(key, 0), row[name])


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None

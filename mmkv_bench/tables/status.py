"""Progress of a store. A "cell" is a stored setting: one model, dataset, method, budget, protocol and seed.

Only committed rows are counted, also while processes write.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.protocols import DEFAULT
from mmkv_bench.store.parts import column_of, numbers_of, places, texts_in, texts_of
from mmkv_bench.store.response import STATUSES
from mmkv_bench.store.rows import refuse_malformed
from mmkv_bench.store.store import Store
from mmkv_bench.store.store_notes import planned_cells
from mmkv_bench.store.tally import Tally, cached_rows, tally

_LABEL_COLUMNS = (
    "cell",
    "dataset",
    "method",
    "budget_entries",
    "budget_fraction",
    "protocol",
    "reading",
    "seed",
    "generation",
)
_CELL_COLUMNS = (*_LABEL_COLUMNS, "config")
_EFFICIENCY_PATTERN = r'"scenario": ?"efficiency"'  # in the configuration of cells with timed passes instead of answers
_RATE_WINDOW_S = 3600.0  # seconds over which the rate is measured


@dataclass(frozen=True)
class DatasetStatus:
    """Progress of one dataset of a store.

    Attributes:
        cells: number of cells that were begun or that queued jobs will begin.
        samples: number of samples per cell, as the runs requested or as their cells have answered, whichever is larger.
        rows: number of answers, failures included. failed: number of failures.
        complete: number of cells that have answered all samples.
        scored: number of cells whose answers are all scored.
        stale: number of cells with answers that are not scored.
    """

    dataset: str
    cells: int
    samples: int
    rows: int
    complete: int
    failed: int
    scored: int
    stale: int

    @property
    def planned(self) -> int:
        """Number of answers that the cells will have."""
        return self.cells * self.samples


@dataclass(frozen=True)
class Status:
    """Progress of a store.

    Attributes:
        failures: (dataset, status, beginning of the message) -> number of rows, the most frequent first.
        passes: status -> number of timed passes (`scenario=efficiency`), which `datasets` does not count.
        running: number of cells whose newest answers running processes have not committed yet.
        writers: number of these processes.
        rate: answers per second in the last hour, or since the first answer of that hour; None without any.
        last: Unix time of the newest committed answer [s]; None without answers.
    """

    root: Path
    datasets: tuple[DatasetStatus, ...]
    failures: Mapping[tuple[str, str, str], int]
    passes: Mapping[str, int]
    running: int
    writers: int
    rate: float | None
    last: float | None

    @property
    def missing(self) -> int:
        return sum(max(one.planned - one.rows, 0) for one in self.datasets)

    @property
    def left(self) -> float | None:
        """Seconds that the missing answers will take at `rate`; None without a rate or without missing answers."""
        return self.missing / self.rate if self.rate and self.missing else None


def status(store: Store) -> Status:
    """Return the progress of a store.

    Raises:
        StoreError: rows are damaged.
    """
    # Cells are read last, because a process writes a cell before the cell's answers.
    answer_tally = tally(store)
    metrics = cached_rows(store, "metrics", ("cell", "n", "answers_digest"))
    timing_table = store.timings()
    timings = [timing_table[name].to_pylist() for name in ("status", "phase", "searched")]
    cells = cached_rows(store, "cells", _CELL_COLUMNS)
    refuse_malformed(cells, store.root)
    cells = cells.filter(texts_in(cells["config"], lambda text: re.search(_EFFICIENCY_PATTERN, text) is None))
    names = cells["cell"].combine_chunks().cast(pa.string())
    if len(names.unique()) != len(names):
        raise StoreError(
            f"some cells of {store.root} have more than one row in `cells`: the store is damaged; restore it from a copy"
        )
    counts, n = answer_tally.counts, numbers_of(answer_tally.counts["n"])
    row_cells = places(counts["cell"], names)
    if (row_cells < 0).any():
        missing = counts["cell"][int(np.flatnonzero(row_cells < 0)[0])].as_py()
        raise StoreError(
            f"cell {missing} of {store.root} has answers but no row in `cells`: the store is damaged; restore it from a copy"
        )
    answered = np.bincount(row_cells, n, len(names)).astype(np.int64)
    is_failed = places(counts["status"], texts_of(list(STATUSES[:1]))) < 0
    failed = np.bincount(row_cells[is_failed], n[is_failed], len(names)).astype(np.int64)
    scored = np.zeros(len(names), np.int64)
    metric_cells = places(metrics["cell"], names)
    np.maximum.at(scored, metric_cells[metric_cells >= 0], numbers_of(metrics["n"])[metric_cells >= 0])
    digests = dict(zip(metrics["cell"].to_pylist(), metrics["answers_digest"].to_pylist(), strict=True))
    answer_digests = answer_tally.digests
    for place, name in enumerate(names.to_pylist()):
        if (digest := digests.get(name)) is not None and answer_digests.get(name, (0, digest))[1] != digest:
            scored[place] = 0  # its answers were made again after scoring
    dataset = np.asarray(cells["dataset"].to_pylist(), object)
    stated_sizes = _requested_samples(cells)
    planned_sizes: dict[str, list[int]] = {}  # dataset -> sample counts of planned cells that no job has begun
    cells_with_rows = set(names.to_pylist()) if (planned := planned_cells(store.root)) else set()
    for cell, (name, samples) in planned.items():
        if cell not in cells_with_rows:
            planned_sizes.setdefault(name, []).append(samples)
    datasets = []
    for name in sorted({*dataset, *planned_sizes}):
        of_dataset, planned_sizes_of_dataset = dataset == name, planned_sizes.get(name, [])
        sizes = [
            *planned_sizes_of_dataset,
            int(stated_sizes[of_dataset].max(initial=0)),
            int(answered[of_dataset].max(initial=0)),
        ]
        samples = max(*sizes, _distinct_samples(answer_tally, of_dataset[row_cells]))
        rows, scores = answered[of_dataset], scored[of_dataset]
        datasets.append(
            DatasetStatus(
                dataset=str(name),
                cells=int(of_dataset.sum()) + len(planned_sizes_of_dataset),
                samples=samples,
                rows=int(rows.sum()),
                complete=int((rows >= samples).sum()),
                failed=int(failed[of_dataset].sum()),
                scored=int(((scores > 0) & (scores >= rows)).sum()),
                stale=int(((rows > 0) & (scores < rows)).sum()),
            )
        )
    passes_by_status = Counter(  # out of memory ends a search for the largest batch
        status
        for status, phase, searched in zip(*timings, strict=True)
        if phase == "total" and not (searched and status == "oom")
    )
    failures = _failures(counts.take(column_of(np.flatnonzero(is_failed))), dataset[row_cells[is_failed]])
    rate, last = _pace(n, numbers_of(counts["first"]) / 1e6, numbers_of(counts["last"]) / 1e6, time.time())
    return Status(
        store.root,
        tuple(datasets),
        failures,
        passes_by_status,
        len(answer_tally.running),
        answer_tally.writers,
        rate,
        last,
    )


def _distinct_samples(answers: Tally, mask: np.ndarray) -> int:
    """Return the number of distinct samples in the rows of `answers.counts` that `mask` (bool) selects."""
    digests = answers.counts["samples"].take(column_of(np.flatnonzero(mask))).unique().to_pylist()
    return len(set().union(*(answers.sets[digest] for digest in digests)))


def _pace(n: np.ndarray, first: np.ndarray, last: np.ndarray, now: float) -> tuple[float | None, float | None]:
    """Return (rate, last) of `Status`.

    Args:
        n: number of answers in each counted batch.
        first, last: Unix times of the first and last answer of each batch [s]. The others are assumed evenly spread between.
        now: Unix time [s].
    """
    if not len(n):
        return None, None
    window_start = max(now - _RATE_WINDOW_S, first[last > now - _RATE_WINDOW_S].min(initial=now))
    share = np.clip((last - np.maximum(first, window_start)) / np.maximum(last - first, 1e-6), 0, 1)
    share[(last == first) & (last >= window_start)] = 1
    answers = float((n * share).sum())
    return (answers / max(now - window_start, 1.0) if answers else None), float(last.max())


def failed_rows(store: Store) -> list[dict[str, Any]]:
    """Return the failed answers, sorted by dataset and sample.

    Keys: dataset, sample_id, label (name of the cell), cell (hash), status, error (message).
    """
    rows = store.responses(None, ("cell", "sample_id", "status", "error"), coded=True)
    rows = rows.filter(pc.not_equal(rows["status"].cast(pa.string()), STATUSES[0])).to_pylist()
    cells = {row["cell"]: row for row in store.cells({row["cell"] for row in rows}, _LABEL_COLUMNS).to_pylist()}
    failure_records = [
        {"dataset": cells[row["cell"]]["dataset"], "sample_id": row["sample_id"], "label": label(cells[row["cell"]])}
        | {"cell": row["cell"], "status": row["status"], "error": row["error"]}
        for row in rows
    ]
    return sorted(failure_records, key=lambda row: (row["dataset"], row["sample_id"], row["label"]))


def label(cell: Mapping[str, Any]) -> str:
    """Return the name of a cell (row of `cells`) for messages, such as `snapkv@64 strict seed=1`."""
    label_parts = [cell["method"]]
    if cell["budget_entries"] is not None:
        label_parts[0] += f"@{cell['budget_entries']}"
    elif cell["budget_fraction"] is not None:
        label_parts[0] += f"@{(Decimal(cell['budget_fraction']) * 100).normalize():f}%"
    label_parts += [cell["protocol"]] * (cell["protocol"] != DEFAULT)
    label_parts += [cell["reading"]] * (cell["reading"] not in (None, "paper"))
    label_parts += question_position(cell)
    return " ".join(label_parts + ([f"seed={cell['seed']}"] if cell["seed"] is not None else []))


def question_position(cell: Mapping[str, Any]) -> list[str]:
    """Return `["at=0.5"]` if the question comes after this share of a video stream; [] if at its end, or without a stream."""
    share = (json.loads(cell["generation"] or "{}").get("stream") or {}).get("ask_at")
    return [] if share is None else [f"at={share:g}"]


def _requested_samples(cells: pa.Table) -> np.ndarray:
    """Return the number of samples that each cell's run requested, int64 [cells]; 0 if the configuration does not tell."""
    configs = cells["config"].combine_chunks()
    configurations = [json.loads(text) for text in configs.dictionary.to_pylist()]
    keys = list(zip(configs.indices.to_pylist(), cells["dataset"].to_pylist(), strict=True))
    samples_of = {key: _requested_count(configurations[key[0]], key[1]) for key in set(keys)}
    return np.array([samples_of[key] for key in keys], np.int64)


def _requested_count(config: Mapping[str, Any], dataset: str) -> int:
    node = (config.get("datasets") or {}).get(dataset) or {}
    fixture = (config.get("data") or {}).get("source") == "fixture"
    stated_size = str((node.get("about") or {}).get("samples") or "").split(" ")[0]
    total = node.get("count") or (int(stated_size) if stated_size.isdigit() and not fixture else None)
    chosen_samples = config.get("samples")
    limit = (
        config.get("limit")
        if chosen_samples is None
        else len(chosen_samples)
        if isinstance(chosen_samples, list)
        else 1
    )
    return min((number for number in (limit, total) if number is not None), default=0) if total else 0


def _failures(counts: pa.Table, datasets: np.ndarray) -> dict[tuple[str, str, str], int]:
    failure_counts: Counter[tuple[str, str, str]] = Counter()
    columns = (counts[name].to_pylist() for name in ("status", "error", "n"))
    for dataset, status, error, n in zip(datasets.tolist(), *columns, strict=True):
        failure_counts[dataset, status, error or ""] += n
    return dict(failure_counts.most_common())

"""How far a store is: cells, samples, failures and scores of each dataset, from its rows alone.

Many processes may be writing meanwhile; what is counted is what they had committed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.protocols import DEFAULT
from mmkv_bench.store.parts import places
from mmkv_bench.store.response import STATUSES
from mmkv_bench.store.store import Store

_CELL = ("cell", "dataset", "method", "budget_entries", "budget_fraction", "protocol", "reading", "seed", "config")
_TIMED = r'"scenario": ?"efficiency"'  # in the configuration of cells that answer nothing
_REASON = 100  # characters of a failure's message


@dataclass(frozen=True)
class DatasetStatus:
    """One dataset of a store.

    Attributes:
        samples: that its cells are to answer: the largest limit of their runs, or all there are; where neither is
            written down, those that some cell has answered.
        rows: answered by its cells, failures among them; complete: cells that have answered all samples.
        scored: cells whose scores are of all their answers; stale: cells with answers that are not scored.
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
        """Rows that its cells will have."""
        return self.cells * self.samples


@dataclass(frozen=True)
class Status:
    """A store.

    Attributes:
        failures: (dataset, status, the message's beginning) -> how many rows ended so, the most frequent first.
        passes: status -> passes of `scenario=efficiency` that ended so; their cells are in no dataset.
    """

    root: Path
    datasets: tuple[DatasetStatus, ...]
    failures: Mapping[tuple[str, str, str], int]
    passes: Mapping[str, int]


def status(store: Store) -> Status:
    """Count a store's rows. Raises StoreError for damaged ones."""
    # Cells last: whoever writes rows has written their cells before.
    rows = store.responses(None, ("cell", "sample_id", "status", "error"), coded=True)
    metrics = store.metrics(None, ("cell", "n"))
    timings = store.timings()
    cells = store.cells(columns=_CELL)
    cells = cells.filter(pc.invert(pc.match_substring_regex(cells["config"], _TIMED)))
    names = cells["cell"].combine_chunks()
    of_row = places(rows["cell"], names)
    answered = np.bincount(of_row, minlength=len(names))
    failed = _failed(rows)
    bad = np.bincount(of_row[failed], minlength=len(names))
    of_metric = places(metrics["cell"], names)
    scored = np.zeros(len(names), np.int64)
    np.maximum.at(scored, of_metric, metrics["n"].to_numpy())
    dataset = np.asarray(cells["dataset"].to_pylist(), object)
    stated = _stated(cells)
    found = []
    for name in sorted(set(dataset)):
        own = dataset == name
        seen = len(pc.unique(rows["sample_id"].filter(pa.array(own[of_row]))))
        samples = max(int(stated[own].max()), seen, int(answered[own].max()))
        found.append(
            DatasetStatus(
                dataset=str(name),
                cells=int(own.sum()),
                samples=samples,
                rows=int(answered[own].sum()),
                complete=int((answered[own] >= samples).sum()),
                failed=int(bad[own].sum()),
                scored=int(((scored[own] > 0) & (scored[own] >= answered[own])).sum()),
                stale=int(((answered[own] > 0) & (scored[own] < answered[own])).sum()),
            )
        )
    ended = pc.value_counts(timings["status"].filter(pc.equal(timings["phase"], "total"))).to_pylist()
    passes = {one["values"]: one["counts"] for one in ended}
    return Status(store.root, tuple(found), _failures(rows.filter(pa.array(failed)), dataset[of_row[failed]]), passes)


def failed_rows(store: Store) -> list[dict[str, Any]]:
    """The rows that are failures: dataset, sample_id, cell's name, status and message, by dataset and sample."""
    rows = store.responses(None, ("cell", "sample_id", "status", "error"), coded=True)
    rows = rows.filter(pa.array(_failed(rows))).to_pylist()
    cells = {row["cell"]: row for row in store.cells({row["cell"] for row in rows}, _CELL[:-1]).to_pylist()}
    found = [
        {"dataset": cells[row["cell"]]["dataset"], "sample_id": row["sample_id"], "label": label(cells[row["cell"]])}
        | {"cell": row["cell"], "status": row["status"], "error": row["error"]}
        for row in rows
    ]
    return sorted(found, key=lambda row: (row["dataset"], row["sample_id"], row["label"]))


def label(cell: Mapping[str, Any]) -> str:
    """A stored cell as messages name it: `snapkv@64 strict seed=1`."""
    parts = [cell["method"]]
    if cell["budget_entries"] is not None:
        parts[0] += f"@{cell['budget_entries']}"
    elif cell["budget_fraction"] is not None:
        parts[0] += f"@{(Decimal(cell['budget_fraction']) * 100).normalize():f}%"
    parts += [cell["protocol"]] * (cell["protocol"] != DEFAULT)
    parts += [cell["reading"]] * (cell["reading"] not in (None, "paper"))
    return " ".join(parts + ([f"seed={cell['seed']}"] if cell["seed"] is not None else []))


def _stated(cells: pa.Table) -> np.ndarray:
    """int64 [cells]: samples that each cell's run asked for, 0 where its configuration does not say. A configuration is
    read once for all its cells."""
    configs = cells["config"].combine_chunks().dictionary_encode()
    read = [json.loads(text) for text in configs.dictionary.to_pylist()]
    datasets = cells["dataset"].to_pylist()
    known: dict[tuple[int, str], int] = {}
    for key in set(zip(configs.indices.to_pylist(), datasets, strict=True)):
        known[key] = _asked(read[key[0]], key[1])
    return np.array([known[key] for key in zip(configs.indices.to_pylist(), datasets, strict=True)], np.int64)


def _asked(config: Mapping[str, Any], dataset: str) -> int:
    node = (config.get("datasets") or {}).get(dataset) or {}
    fixture = (config.get("data") or {}).get("source") == "fixture"
    stated = str((node.get("about") or {}).get("samples") or "").split(" ")[0]
    total = node.get("count") or (int(stated) if stated.isdigit() and not fixture else None)
    limit = config.get("limit")
    return min((number for number in (limit, total) if number is not None), default=0) if total else 0


def _failures(rows: pa.Table, datasets: np.ndarray) -> dict[tuple[str, str, str], int]:
    counted: dict[tuple[str, str, str], int] = {}
    kinds = zip(datasets.tolist(), rows["status"].to_pylist(), rows["error"].to_pylist(), strict=True)
    for dataset, status, error in kinds:
        first = (error or "").strip().partition("\n")[0]
        key = dataset, status, first if len(first) <= _REASON else first[:_REASON] + "..."
        counted[key] = counted.get(key, 0) + 1
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def _failed(rows: pa.Table) -> np.ndarray:
    """bool [rows]."""
    return places(rows["status"], pa.array(STATUSES[:1])) < 0

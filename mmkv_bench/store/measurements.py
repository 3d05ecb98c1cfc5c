"""Files of the tables `timings`, `diagnostics` and `prompts`, and which of their rows are the newest.

Each timed pass (of one cell, length, batch and repeat number) has its own file, and so have the diagnostic measurements
made together on one sample. Measuring again replaces the file. A packed file may have older copies of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store.files import canonical_json, checksum
from mmkv_bench.store.parts import column_of, keys, numbers_of
from mmkv_bench.store.rows import safe_name

_PASS_COLUMNS = ("cell", "prompt_tokens", "batch", "batch_prefill", "repeat")
MEASUREMENT = ("measurement", "sample_id")
"""Rows of `diagnostics` with equal values here are written together, and newer ones replace them."""
PROMPT = ("prompt_hash", "sample_id", "dataset", "model_fingerprint")


def file_of_pass(root: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Return the path of the file for one timed pass. Raises StoreError unless all rows are of one pass."""
    passes = {tuple(row.get(name) for name in _PASS_COLUMNS) for row in rows}
    if len(passes) != 1:
        raise StoreError(f"timings: got rows of {len(passes)} passes; write one pass at a time")
    cell, tokens, batch, prefill_mode, repeat = passes.pop()
    batch_text = str(batch) if prefill_mode is None else f"{batch}.{prefill_mode}"
    name = f"{cell}.{tokens}.{batch_text}.{'memory' if repeat is None else repeat}"
    return root / "timings" / f"{safe_name('pass', name)}.parquet"


def newest_passes(rows: pa.Table) -> pa.Table:
    """Return the newest rows of each timed pass, sorted by pass."""
    rows = committed_last(rows, _PASS_COLUMNS)
    return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in _PASS_COLUMNS])) if rows.num_rows else rows


def load_warning(loads: Iterable[float], threads: Iterable[float]) -> str | None:
    """Return a warning if the machine did other work during the timed passes, else None.

    loads: load average over the last minute at the end of each pass, NaN if unknown.
    threads: number of threads of each pass, NaN if unknown.
    """
    known_loads = [load for load in loads if not isnan(load)]
    most_threads = max((count for count in threads if not isnan(count)), default=None)
    if not known_loads or most_threads is None or median(known_loads) < most_threads + 1:
        return None
    return (
        f"other work on the machine, whose load was {median(known_loads):.1f} (median) beside passes of "
        f"{'1 thread' if most_threads == 1 else f'{most_threads:.0f} threads'}: times are longer than when it is idle"
    )


def file_of_sample(root: Path, rows: pa.Table) -> Path:
    """Return the path for a sample's rows of `diagnostics`, named after analysis, sample and measurements.

    Raises StoreError unless all rows are of one sample and one analysis.
    """
    analysis_names, sample_ids, measurements = (
        rows[name].unique().to_pylist() for name in ("name", "sample_id", "measurement")
    )
    if len(analysis_names) != 1 or len(sample_ids) != 1:
        raise StoreError(
            f"diagnostics: got rows of {len(sample_ids)} samples and {len(analysis_names)} analyses in one call; "
            "write one sample of one analysis per call"
        )
    digest = checksum(canonical_json([sample_ids[0], sorted(measurements)]).encode())
    return root / "diagnostics" / f"{safe_name('measurement', f'{analysis_names[0]}.{digest}')}.parquet"


def committed_last(rows: pa.Table, unit: Sequence[str]) -> pa.Table:
    """Group rows by the columns `unit`, and return each group's rows with the newest commit time."""
    _, unit_of_row = np.unique(keys(rows, unit), return_inverse=True)
    commit_times = numbers_of(rows["committed_at"].cast(pa.int64()))
    last_commit_of_unit = np.full(unit_of_row.max(initial=-1) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last_commit_of_unit, unit_of_row, commit_times)
    return rows.take(column_of(np.flatnonzero(commit_times == last_commit_of_unit[unit_of_row])))

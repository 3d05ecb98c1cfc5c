"""Scores of many cells in one file per table: thousands of small files, each synced, would take longer than scoring.

A file `together-<countdown>-<id>.parquet` stands in `samples/` and one of the same name in `metrics/`. That of `metrics` is
placed first and counts only as long as that of `samples` is there, so both appear in one step. For the cells that they hold they
count before cells' own files and packed ones, the newest first (its countdown is the smallest).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from mmkv_bench.store import parts
from mmkv_bench.store.files import Staged, sync_folder
from mmkv_bench.store.sealed import opened

APART = 64
"""Cells up to which each gets files of its own."""

_PREFIX = "together-"
_EMPTY = b"cells_without_scores"
"""Metadata of a file of samples: cells that it replaces by nothing."""


def is_together(path: Path) -> bool:
    return path.name.startswith(_PREFIX)


def files(root: Path, table: str) -> list[Path]:
    """Those that count, the newest first."""
    folder = root / table
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(_PREFIX) and name.endswith(".parquet"))
    except FileNotFoundError:
        return []
    return [folder / name for name in names if table != "metrics" or (root / "samples" / name).exists()]


def held(root: Path, name: str) -> set[str]:
    """The cells whose scores the files of this name replace, those that have none left among them.

    Raises FileNotFoundError, StoreError.
    """
    path = root / "samples" / name
    with parts.readable(path), opened(path) as (file, _):
        empty = json.loads((file.schema_arrow.metadata or {}).get(_EMPTY, b"[]"))
        return {*file.read(["cell"])["cell"].unique().to_pylist(), *empty}


def write(root: Path, tables: Mapping[str, pa.Table], cells: set[str]) -> None:
    """Replaces the scores of `cells` by `tables` (checked `samples` and `metrics`), in one step."""
    older = files(root, "samples")
    # Newer than all that is there also where the clocks of two machines disagree.
    countdown = min([10**20 - time.time_ns(), *(int(path.name.split("-")[1]) - 1 for path in older[:1])])
    name = f"{_PREFIX}{countdown:020d}-{uuid.uuid4().hex[:8]}.parquet"
    empty = sorted(cells.difference(tables["samples"]["cell"].unique().to_pylist()))
    samples = tables["samples"].replace_schema_metadata({_EMPTY: json.dumps(empty)} if empty else None)
    staged: list[Staged] = []
    try:
        for table, rows in (("metrics", tables["metrics"]), ("samples", samples)):
            staged.append(Staged(root / table / name, parts.parquet(rows)))
        for file in staged:
            file.place()
    finally:
        for file in staged:
            file.drop()
    _clear(root, name, cells)


def _clear(root: Path, name: str, cells: set[str]) -> None:
    """Files that count no more: the cells' own, and older ones together of which no other cell is left."""
    for table in ("samples", "metrics"):
        for path in (root / table).glob("*.parquet"):
            if path.stem in cells:
                path.unlink(missing_ok=True)
    for path in files(root, "samples"):
        if path.name > name and cells >= held(root, path.name):
            (root / "metrics" / path.name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    for table in ("samples", "metrics"):
        sync_folder(root / table)

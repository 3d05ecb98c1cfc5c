"""Scores of many cells in one file per table: thousands of small files, each synced, would take longer than scoring.

A file `together-<countdown>-<id>.parquet` stands in `samples/` and one of the same name in `metrics/`. That of `metrics` is
placed first and counts only as long as that of `samples` is there, so both appear in one step. For the cells that they hold they
count before cells' own files and packed ones, the newest first (its countdown is the smallest).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store import parts
from mmkv_bench.store.files import Staged, sync_folder
from mmkv_bench.store.schema import COLUMNS, SCHEMA_VERSION, SCHEMAS

APART = 64
"""Cells up to which each gets files of its own."""

_PREFIX = "together-"
_KEYS = {"samples": ("cell", "sample_id", "metric"), "metrics": ("cell", "metric")}


def is_together(path: Path) -> bool:
    return path.name.startswith(_PREFIX)


def files(root: Path, table: str) -> list[Path]:
    """Those that count, the newest first."""
    found = sorted((root / table).glob(f"{_PREFIX}*.parquet"))
    return [path for path in found if table != "metrics" or (root / "samples" / path.name).exists()]


def write(root: Path, tables: Mapping[str, pa.Table], cells: set[str]) -> None:
    """Replaces the scores of `cells` by `tables` (checked `samples` and `metrics`), in one step."""
    name = f"{_PREFIX}{10**20 - time.time_ns():020d}-{uuid.uuid4().hex[:8]}.parquet"
    staged: list[Staged] = []
    try:
        for table in ("metrics", "samples"):
            staged.append(Staged(root / table / name, parts.parquet(tables[table])))
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
        held = parts.load("samples", lambda path=path: [path], ["cell"])["cell"].unique().to_pylist()
        if path.name > name and cells.issuperset(held):
            (root / "metrics" / path.name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    for table in ("samples", "metrics"):
        sync_folder(root / table)


def checked(table: str, rows: pa.Table) -> pa.Table:
    """The rows with all columns of `table`, as `rows.check` would have them; columns that may be null can be left out.

    Raises StoreError naming the column, or the rows that are twice.
    """
    schema = SCHEMAS[table]
    arrays = []
    for column in COLUMNS[table]:
        if column.stamped:
            found = pa.chunked_array([pa.repeat(pa.scalar(SCHEMA_VERSION, column.type), rows.num_rows)])
        elif column.name in rows.column_names:
            found = rows[column.name].cast(column.type)
        else:
            found = pa.chunked_array([pa.nulls(rows.num_rows, column.type)])
        if column.required == "always" and found.null_count:
            raise StoreError(f"{table}: column {column.name!r} is missing or null; it is required ({column.doc})")
        if column.allowed and not set(found.drop_null().unique().to_pylist()) <= set(column.allowed):
            raise StoreError(f"{table}: column {column.name!r} holds other values than {', '.join(column.allowed)}")
        if pa.types.is_floating(column.type) and pc.any(pc.invert(pc.is_finite(found))).as_py():
            raise StoreError(f"{table}: column {column.name!r} holds numbers that are not finite ({column.doc})")
        arrays.append(found)
    made = pa.Table.from_arrays(arrays, schema=schema)
    _check_rules(table, made)
    if len(np.unique(parts.keys(made, _KEYS[table]))) < made.num_rows:
        raise StoreError(f"{table}: two rows with the same {' and '.join(_KEYS[table])}")
    return made


def _check_rules(table: str, rows: pa.Table) -> None:
    """The rules between columns, see `rows.py`."""
    if table == "samples":
        broken = pc.and_(pc.not_equal(rows["status"], "ok"), pc.is_valid(rows["value"]))
        rule = "column 'value' must be null when status is not 'ok'"
    else:
        short = pc.less(rows["n_ok"], rows["n"])
        wrong = pc.or_(pc.less(rows["n_ok"], 0), pc.greater(rows["n_ok"], rows["n"]))
        broken = pc.or_(wrong, pc.and_(short, pc.is_valid(rows["value"])))
        rule = "column 'n_ok' must be between 0 and n, and 'value' null unless every sample is ok"
    if pc.any(broken).as_py():
        raise StoreError(f"{table}: {rule}")

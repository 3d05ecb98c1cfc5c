"""Rows of `mmkv-bench diagnose`: one file per sample and what was measured of it together, until they are packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store.digests import canonical_json, checksum
from mmkv_bench.store.rows import safe_name
from mmkv_bench.store.schema import SCHEMAS

TABLE = "diagnostics"
_UNIT = ("measurement", "sample_id")
"""Rows that agree in these are written together, and newer ones replace them."""


def stamped(rows: pa.Table, stamps: Mapping[str, Any]) -> pa.Table:
    """The rows with the store's own columns, in the schema's order and types.

    Raises:
        StoreError: a column too many or too few, another type, a null or a number that is not finite where none may be.
    """
    schema = SCHEMAS[TABLE]
    for name, value in stamps.items():
        rows = rows.append_column(name, pa.array([value] * rows.num_rows, schema.field(name).type))
    if set(rows.column_names) != set(schema.names):
        odd = sorted(set(rows.column_names) ^ set(schema.names))
        raise StoreError(f"{TABLE}: columns {', '.join(odd)} are not those of the table; see docs/rows.md")
    try:
        rows = rows.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as problem:
        raise StoreError(f"{TABLE}: {problem}") from None
    if rows.num_rows and not pc.all(pc.is_finite(rows["value"])).as_py():
        raise StoreError(f"{TABLE}: column 'value' has numbers that are not finite")
    return rows


def file_of(root: Path, rows: pa.Table) -> Path:
    """Where the rows of one sample lie: the same measurements of it, made again, replace them.

    Raises:
        StoreError: none, or of several samples or analyses.
    """
    found = {name: rows[name].unique().to_pylist() for name in ("name", "sample_id", "measurement")}
    if len(found["name"]) != 1 or len(found["sample_id"]) != 1:
        raise StoreError(f"{TABLE}: rows of {len(found['sample_id'])} samples are not those of one")
    digest = checksum(canonical_json([found["sample_id"][0], sorted(found["measurement"])]).encode())
    name = safe_name("measurement", f"{found['name'][0]}.{digest}")
    return root / TABLE / f"{name}.parquet"


def newest(rows: pa.Table) -> pa.Table:
    """The rows of each measurement and sample that were committed last; packed rows may stand beside newer ones."""
    if not rows.num_rows:
        return rows
    which = _units(rows)
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    last = np.full(which.max() + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, which, when)
    return rows.filter(pa.array(when == last[which]))


def samples_of(rows: pa.Table, measurements: Collection[str]) -> dict[str, set[str]]:
    """Measurement -> the samples that have rows of it. rows: the columns measurement and sample_id."""
    found: dict[str, set[str]] = {name: set() for name in measurements}
    kept = rows.filter(pc.is_in(rows["measurement"], value_set=pa.array(sorted(found), pa.string())))
    for pair in kept.group_by(list(_UNIT)).aggregate([]).to_pylist():
        found[pair["measurement"]].add(pair["sample_id"])
    return found


def _units(rows: pa.Table) -> np.ndarray:
    """Number of each row's measurement and sample, int [rows]."""
    codes = [_codes(rows[name]) for name in _UNIT]
    _, which = np.unique(np.stack(codes), axis=1, return_inverse=True)
    return which.reshape(-1)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    texts = column.cast(pa.string()).combine_chunks()
    return texts.dictionary_encode().indices.to_numpy()

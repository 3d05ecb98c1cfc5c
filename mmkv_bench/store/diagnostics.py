"""Rows of `mmkv-bench diagnose`: one file per measurement, which the same measurement made again replaces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store.rows import safe_name
from mmkv_bench.store.schema import SCHEMAS

TABLE = "diagnostics"


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
    """Where the rows of one measurement lie.

    Raises:
        StoreError: none, or of several measurements.
    """
    found = rows.group_by(["name", "measurement"]).aggregate([]).to_pylist()
    if len(found) != 1:
        raise StoreError(f"{TABLE}: rows of {len(found)} measurements are not those of one")
    name = f"{found[0]['name']}.{found[0]['measurement']}"
    return root / TABLE / f"{safe_name('measurement', name)}.parquet"

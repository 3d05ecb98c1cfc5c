"""A digest in each row of `cells` and `metrics`, of its other columns: whoever writes a file again with its checksum right, but a
value changed, is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import StoreError
from mmkv_bench.store.digests import canonical_json, checksum
from mmkv_bench.store.schema import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "row_digest"
_DIGESTED = {
    table: tuple(column.name for column in COLUMNS[table] if not column.stamped and column.name != NAME)
    for table in ("cells", "metrics")
}
_REMEDY = {"cells": "which writes it", "metrics": "with stage=score, which makes it of the answers"}


def digest_of_row(table: str, row: Mapping[str, Any]) -> str:
    """Digest of a row's columns but the stamped ones. Nulls are left out, so that a column that is newer changes none."""
    known = [[name, _short(row[name])] for name in _DIGESTED[table] if row[name] is not None]
    return checksum(canonical_json(known).encode())


def digested(table: str, rows: pa.Table) -> pa.Table:
    """The rows (all columns) with their digests."""
    import pyarrow as pa

    made = pa.array([digest_of_row(table, row) for row in rows.to_pylist()], pa.string())
    return rows.set_column(rows.column_names.index(NAME), rows.schema.field(NAME), made)


def refuse_rewritten(table: str, rows: pa.Table, root: Path) -> None:
    """Raises StoreError when a row (all columns) is another than was written, though its file's checksum is right."""
    for batch in rows.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            if row[NAME] is not None and row[NAME] != digest_of_row(table, row):
                what = f"{row['metric']} of " if table == "metrics" else ""
                raise StoreError(
                    f"the row of {what}cell {row['cell']} under {root} was written again with other values: restore its file in "
                    f"{table}/ from a copy, or move it away and run the same command again, {_REMEDY[table]}"
                )


@lru_cache(maxsize=256)
def _digest(text: str) -> str:
    return checksum(text.encode())


def _short(value: Any) -> Any:
    """A configuration, which the cells of a run share, by its digest."""
    return _digest(value) if isinstance(value, str) and len(value) > 256 else value

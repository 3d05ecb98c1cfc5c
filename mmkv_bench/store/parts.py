"""Parquet files of rows: written whole, read together, and reduced to the newest row per cell and sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from mmkv_bench.errors import StoreError
from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS

_RETRIES = 20


def parquet(table: pa.Table) -> Callable[[BinaryIO], None]:
    """A writer of `table` for `files.Staged`."""
    return lambda stream: pq.write_table(table, stream, compression="zstd")


def load(
    table: str, list_files: Callable[[], list[Path]], columns: Iterable[str], cells: Collection[str] | None = None
) -> pa.Table:
    """The rows of all files that `list_files` names, with `columns` and, if given, of `cells` only.

    Raises StoreError for an unreadable file or one of another schema version, naming it.
    """
    columns = list(columns)
    schema = pa.schema([SCHEMAS[table].field(name) for name in columns])
    wanted = None if cells is None else ds.field("cell").isin(list(cells))
    read = [*columns, "schema_version"] if "schema_version" not in columns else columns
    for _ in range(_RETRIES):
        files = sorted(list_files())
        if not files or (cells is not None and not cells):
            return schema.empty_table()
        try:
            data = ds.dataset([str(path) for path in files], schema=SCHEMAS[table], format="parquet")
            rows = data.to_table(columns=read, filter=wanted)
        except FileNotFoundError:
            continue  # a cell's scores were being replaced between the listing and the reading
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError) as problem:
            _explain(files, problem)
            raise StoreError(f"{files[0].parent} cannot be read: {problem}") from problem
        if pc.any(pc.not_equal(rows["schema_version"], SCHEMA_VERSION)).as_py():
            _explain(files, None)
        return rows.select(columns).cast(schema)
    raise StoreError(f"{files[0].parent}: files keep vanishing while they are read; is another program removing them?")


def _explain(files: list[Path], problem: Exception | None) -> None:
    """Raises the StoreError that names the file at fault; returns when none is found."""
    for path in files:
        try:
            versions = set(pq.read_table(path, columns=["schema_version"])["schema_version"].to_pylist())
        except FileNotFoundError:
            continue
        except (pa.ArrowException, OSError) as error:
            raise StoreError(
                f"{path} is not a readable part of a result store ({error}). Move it away: "
                "what only it holds is made again."
            ) from problem
        if versions - {SCHEMA_VERSION}:
            refuse_version(path, *sorted(versions - {SCHEMA_VERSION}))


def refuse_version(where: Path, found: object, *_more: object) -> None:
    """Raises the error for rows of another schema version."""
    raise StoreError(
        f"{where} was written under row schema version {found}; this program uses version {SCHEMA_VERSION}. "
        "Use another result folder, or the version of mmkv_bench that wrote this one."
    )


def newest(rows: pa.Table) -> pa.Table:
    """One row per (cell, sample_id), the one committed last, sorted by both. A tie goes to the later row."""
    if rows.num_rows == 0:
        return rows
    key = np.zeros(rows.num_rows, dtype=np.int64)
    for name in ("cell", "sample_id"):
        codes = rows[name].combine_chunks().dictionary_encode()
        rank = pc.rank(codes.dictionary, tiebreaker="first").to_numpy().astype(np.int64) - 1
        key = key * len(rank) + rank[codes.indices.to_numpy()]
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    order = np.lexsort((when, key))
    last = np.append(key[order][1:] != key[order][:-1], True)
    return rows.take(order[last])

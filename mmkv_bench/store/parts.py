"""Parquet files of rows: written whole, read together, and reduced to the newest row per cell and sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS
from mmkv_bench.store.sealed import Damaged, opened, sealed

_RETRIES = 20
CODED = pa.dictionary(pa.int32(), pa.string())


def parquet(table: pa.Table) -> Callable[[BinaryIO], object]:
    """A writer of `table` for `files.Staged`."""
    return lambda stream: stream.write(sealed(table, compression="zstd"))


def load(
    table: str,
    list_files: Callable[[], list[Path]],
    columns: Sequence[str],
    cells: Collection[str] | None = None,
    unchecked: set[Path] | None = None,
    coded: bool = False,
) -> pa.Table:
    """The rows of all files that `list_files` names, in the order of their names: `columns`, and of `cells` only if given.

    File by file: as quick as a pyarrow dataset, whose import alone (it brings pandas) costs more than most reads.
    coded: texts as dictionaries, as they stand in the files: each once, and not once per row.
    Files that carry no digest, being older, are added to `unchecked`. Raises StoreError for a damaged or unreadable file
    and for one of another schema version, naming it.
    """
    schema = of_columns(table, columns, coded)
    for _ in range(_RETRIES):
        try:
            tables = [_read(path, schema, cells, unchecked) for path in sorted(list_files())]
        except FileNotFoundError:
            continue  # a cell's scores were being replaced between the listing and the reading
        return pa.concat_tables([schema.empty_table(), *tables])
    raise StoreError(f"{table}: files keep vanishing while they are read; is another program removing them?")


def of_columns(table: str, columns: Sequence[str], coded: bool = False) -> pa.Schema:
    """The schema of some columns; coded: texts are dictionaries."""
    fields = [SCHEMAS[table].field(name) for name in columns]
    return pa.schema(
        [field.with_type(CODED) if coded and pa.types.is_string(field.type) else field for field in fields]
    )


def is_in(column: pa.ChunkedArray, texts: pa.Array) -> pa.ChunkedArray:
    """Which rows of a column of texts, coded or not, are among `texts`."""
    if not pa.types.is_dictionary(column.type):
        return pc.is_in(column, value_set=texts)
    found = [pc.is_in(chunk.dictionary, value_set=texts).take(chunk.indices) for chunk in column.chunks]
    return pa.chunked_array(found, pa.bool_())


def places(column: pa.ChunkedArray, texts: pa.Array) -> np.ndarray:
    """int64 [rows]: where among `texts` each text of a column, coded or not, stands; -1 for others."""
    if not len(column):
        return np.zeros(0, np.int64)
    codes = column.combine_chunks()
    if not pa.types.is_dictionary(codes.type):
        codes = codes.dictionary_encode()
    found = pc.fill_null(pc.index_in(codes.dictionary, value_set=texts), -1).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)[codes.indices.to_numpy()]


def _read(path: Path, schema: pa.Schema, cells: Collection[str] | None, unchecked: set[Path] | None) -> pa.Table:
    with readable(path):
        with opened(path, [field.name for field in schema if field.type == CODED]) as (file, checked):
            held = set(file.schema_arrow.names)
            rows = file.read(
                columns=[name for name in dict.fromkeys(["schema_version", *schema.names, "cell"]) if name in held]
            )
        if pc.any(pc.not_equal(rows["schema_version"], SCHEMA_VERSION)).as_py():
            found = rows["schema_version"].to_pylist()
            refuse_version(path, next(version for version in found if version != SCHEMA_VERSION))
        if not checked and unchecked is not None:
            unchecked.add(path)
        for name in schema.names:  # columns that may be null can be newer than the file
            if name not in held and schema.field(name).nullable:
                rows = rows.append_column(schema.field(name), pa.nulls(rows.num_rows, schema.field(name).type))
        if cells is not None:
            rows = rows.filter(is_in(rows["cell"], pa.array(list(cells), pa.string())))
        return rows.select(schema.names).cast(schema)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what reading a damaged file raises into a StoreError that names it; FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (Damaged, pa.ArrowException, OSError, KeyError, ValueError) as problem:
        raise StoreError(
            f"{path} is not a readable part of a result store ({problem}). Restore it from a copy, or move it away: what "
            "only it holds is then made again."
        ) from problem


def refuse_version(where: Path, found: object) -> None:
    """Raises the error for rows of another schema version."""
    raise StoreError(
        f"{where} was written under row schema version {found}; this program uses version {SCHEMA_VERSION}. "
        "Use another result folder, or the version of mmkv_bench that wrote this one."
    )


def newest(rows: pa.Table) -> pa.Table:
    """One row per (cell, sample_id), the one committed last, sorted by both. A tie goes to the later row."""
    key = keys(rows, ("cell", "sample_id"))
    if np.all(key[1:] > key[:-1]):  # the parts of one cell
        return rows
    order = np.argsort(key, kind="stable")
    if np.all(np.diff(key[order]) > 0):
        return rows.take(order)
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    order = np.lexsort((when, key))
    last = np.append(key[order][1:] != key[order][:-1], True)
    return rows.take(order[last])


def keys(rows: pa.Table, names: Sequence[str]) -> np.ndarray:
    """A number for each row, int64 [rows], that orders and tells rows apart as these text columns do."""
    key = np.zeros(rows.num_rows, dtype=np.int64)
    for name in names if rows.num_rows else ():
        codes = rows[name].combine_chunks().dictionary_encode()
        rank = pc.rank(codes.dictionary, tiebreaker="first").to_numpy().astype(np.int64) - 1
        key = key * len(rank) + rank[codes.indices.to_numpy()]
    return key

"""Parquet files of rows: written whole, read together, and reduced to the newest row per cell and sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mmkv_bench.errors import StoreError
from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS
from mmkv_bench.store.sealed import KEY, Damaged, opened, sealed, write_sealed

_RETRIES = 20
ROW_GROUP = 1 << 13  # rows of a part above which it has several row groups, each of about so many
CODED = pa.dictionary(pa.int32(), pa.string())
GROUPS_HELD = 1 << 18  # cells of a file's row groups that are remembered
_cells_of_groups: dict[bytes, dict[int, frozenset[str]]] = {}  # digest of a file -> of its row groups


def parquet(table: pa.Table) -> Callable[[BinaryIO], object]:
    """A writer of `table` for `files.Staged`."""
    return lambda stream: stream.write(sealed(table, compression="zstd"))


def part(rows: pa.Table) -> Callable[[BinaryIO], object]:
    """A writer of response rows as they were committed, sample after sample. Many are written cell after cell, in the order
    in which the cells came, in row groups of whole cells: who asks for neighbours then reads little more than their rows."""
    if rows.num_rows <= ROW_GROUP:
        return parquet(rows)
    codes = codes_of(rows["cell"].combine_chunks().dictionary_encode())  # numbered as they come
    order = np.argsort(codes, kind="stable")
    by_cell = rows.take(column_of(order))
    groups = [by_cell.slice(start, end - start) for start, end in runs(codes[order], ROW_GROUP)]
    return lambda stream: write_sealed(stream, rows.schema, groups, compression="zstd")


def runs(codes: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """Where pieces of so many rows begin and end, and more where a cell's reach further; codes: sorted, a number per cell."""
    ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes))
    cuts = ends[np.searchsorted(ends, np.arange(rows, len(codes), rows))]
    return list(pairwise(np.unique([0, *cuts.tolist(), len(codes)]).tolist()))


def load(
    table: str,
    list_files: Callable[[], list[Path]],
    columns: Sequence[str],
    cells: Collection[str] | None = None,
    unchecked: set[Path] | None = None,
    coded: bool = False,
    metrics: Collection[str] | None = None,
) -> pa.Table:
    """The rows of all files that `list_files` names, in the order of their names: `columns`, and of `cells` only if given, and
    of `metrics`.

    File by file: as quick as a pyarrow dataset, whose import alone (it brings pandas) costs more than most reads.
    coded: texts as dictionaries, as they stand in the files: each once, and not once per row.
    Files that carry no digest, being older, are added to `unchecked`. Raises StoreError for a damaged or unreadable file
    and for one of another schema version, naming it.
    """
    schema = of_columns(table, columns, coded)
    for _ in range(_RETRIES):
        try:
            tables = [read_file(path, schema, cells, unchecked, metrics) for path in sorted(list_files())]
        except FileNotFoundError:
            continue  # a cell's scores were being replaced between the listing and the reading
        return pa.concat_tables([no_rows(schema), *tables])
    raise StoreError(f"{table}: files keep vanishing while they are read; is another program removing them?")


def of_columns(table: str, columns: Sequence[str], coded: bool = False) -> pa.Schema:
    """The schema of some columns; coded: texts are dictionaries."""
    fields = [SCHEMAS[table].field(name) for name in columns]
    return pa.schema(
        [field.with_type(CODED) if coded and pa.types.is_string(field.type) else field for field in fields]
    )


def no_rows(schema: pa.Schema) -> pa.Table:
    """An empty table; `Schema.empty_table` imports pandas (see `column_of`)."""
    return pa.Table.from_batches([], schema)


def column_of(values: np.ndarray) -> pa.Array:
    """Numbers as they lie in memory: `pyarrow.array` imports pandas, which takes longer than reading most stores."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def numbers_of(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """The whole numbers of a column without nulls; `to_numpy` imports pandas (see `column_of`)."""
    if not len(column):
        return np.zeros(0, str(column.type))
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        raise ValueError("a column of numbers has nulls")
    return np.frombuffer(array.buffers()[1], str(array.type))[array.offset : array.offset + len(array)]


def coded(column: pa.ChunkedArray | pa.Array) -> pa.DictionaryArray:
    """A column in one piece with each of its texts once."""
    codes = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return codes if pa.types.is_dictionary(codes.type) else codes.dictionary_encode()


def codes_of(codes: pa.DictionaryArray) -> np.ndarray:
    """int64 [rows]: the place of each row's text in the dictionary, -1 for null."""
    indices, rows = codes.indices, slice(codes.indices.offset, codes.indices.offset + len(codes))
    if not len(codes):
        return np.zeros(0, np.int64)
    there, values = indices.buffers()
    found = np.frombuffer(values, str(indices.type))[rows].astype(np.int64)
    if indices.null_count:
        found[np.unpackbits(np.frombuffer(there, np.uint8), bitorder="little")[rows] == 0] = -1
    return found


def texts_of(values: list[str]) -> pa.Array:
    """Texts, likewise: int32 offsets, so at most 2 GiB of them."""
    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def is_in(column: pa.ChunkedArray, texts: pa.Array) -> pa.ChunkedArray:
    """Which rows of a column of texts, coded or not, are among `texts`."""
    if not pa.types.is_dictionary(column.type):
        return pc.is_in(column, value_set=texts)
    found = [pc.is_in(chunk.dictionary, value_set=texts).take(chunk.indices) for chunk in column.chunks]
    return pa.chunked_array(found, pa.bool_())


def texts_in(column: pa.ChunkedArray, wanted: Callable[[str], bool]) -> pa.Array:
    """bool [rows]: which texts of a coded column are `wanted`; each different one is asked about once."""
    codes = column.combine_chunks()
    found = np.array([wanted(text) for text in codes.dictionary.to_pylist()], bool)[numbers_of(codes.indices)]
    return pa.Array.from_buffers(pa.bool_(), len(found), [None, pa.py_buffer(np.packbits(found, bitorder="little"))])


def places(column: pa.ChunkedArray, texts: pa.Array) -> np.ndarray:
    """int64 [rows]: where among `texts`, all different, each text of a column, coded or not, stands; -1 for others."""
    if not len(column):
        return np.zeros(0, np.int64)
    codes = coded(column)
    known = {text: place for place, text in enumerate(texts.to_pylist())}
    found = np.array([known.get(text, -1) for text in codes.dictionary.to_pylist()] + [-1], np.int64)
    return found[codes_of(codes)]


def read_file(
    path: Path,
    schema: pa.Schema,
    cells: Collection[str] | None,
    unchecked: set[Path] | None,
    metrics: Collection[str] | None = None,
) -> pa.Table:
    """The rows of one file, as `load`; FileNotFoundError where it is gone. Of `cells` and `metrics` only those row groups are
    decoded that hold one of them."""
    wanted = {"cell": cells, "metric": metrics}
    asked = {column: texts_of(list(texts)) for column, texts in wanted.items() if texts is not None}
    with readable(path):
        with opened(path, sorted({*asked, *(field.name for field in schema if field.type == CODED)})) as (
            file,
            checked,
        ):
            held = set(file.schema_arrow.names)
            names = [name for name in dict.fromkeys(["schema_version", *schema.names, *asked]) if name in held]
            rows = _rows_of(path, file, names, asked) if asked else file.read(names)
        rows = _as(path, rows, schema)
        if not checked and unchecked is not None:
            unchecked.add(path)
        return rows


def read_by_group(path: Path, schema: pa.Schema, unchecked: set[Path] | None) -> Iterator[pa.Table]:
    """The rows of one file, as `load`, one row group after the other; FileNotFoundError where it is gone."""
    with readable(path), opened(path) as (file, checked):
        if not checked and unchecked is not None:
            unchecked.add(path)
        held = set(file.schema_arrow.names)
        names = [name for name in dict.fromkeys(["schema_version", *schema.names]) if name in held]
        for number in range(file.num_row_groups):
            yield _as(path, file.read_row_group(number, names), schema)


def _as(path: Path, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows as this version has them; columns that may be null can be newer than the file."""
    _check_version(path, rows)
    held = set(rows.column_names)
    for field in schema:
        if field.name not in held and field.nullable:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select(schema.names).cast(schema)


def _rows_of(path: Path, file: pq.ParquetFile, names: list[str], asked: Mapping[str, pa.Array]) -> pa.Table:
    """The rows of the texts that are asked for in each of some columns, one row group after the other: cells that were scored
    together may lie in all groups of a file that fits into no memory."""
    found = [file.read_row_groups([], names)]
    for number in _groups_of(path, file, asked):
        rows = file.read_row_group(number, names)
        for column, texts in asked.items():
            rows = rows.filter(is_in(rows[column], texts))
        found.append(rows)
    return pa.concat_tables(found)


def _groups_of(path: Path, file: pq.ParquetFile, asked: Mapping[str, pa.Array]) -> Iterator[int]:
    """The row groups that have a row of the texts that are asked for in each of some columns: most parts of a large store have
    none of a run's own cells. One after the other, so that of a large file no whole column is in memory."""
    known = _known_groups(file) if [*asked] == ["cell"] else None
    wanted = set(asked["cell"].to_pylist()) if known is not None else set()
    for number in range(file.num_row_groups):
        if known is not None and number in known:
            found = not known[number].isdisjoint(wanted)
        else:
            few = file.read_row_group(number, ["schema_version", *asked])
            _check_version(path, few)
            found = all(pc.any(is_in(few[column], texts), min_count=0).as_py() for column, texts in asked.items())
            if known is not None and sum(map(len, known.values())) < GROUPS_HELD:
                known[number] = frozenset(map(sys.intern, few["cell"].unique().to_pylist()))
        if found:
            yield number


def _known_groups(file: pq.ParquetFile) -> dict[int, frozenset[str]] | None:
    """Row group -> its cells, as far as they were read in this process: cells that are scored or packed some at a time look
    into every part again and again. None of a file without a digest."""
    digest = (file.metadata.metadata or {}).get(KEY.encode())
    return None if digest is None else _cells_of_groups.setdefault(digest, {})


def _check_version(path: Path, rows: pa.Table) -> None:
    versions = numbers_of(rows["schema_version"])
    if (versions != SCHEMA_VERSION).any():
        refuse_version(path, int(versions[versions != SCHEMA_VERSION][0]))


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


def newest(rows: pa.Table, unit: Sequence[str] = ("cell", "sample_id")) -> pa.Table:
    """One row per unit, the one committed last, sorted by the unit's columns. A tie goes to the later row."""
    key = keys(rows, unit)
    if np.all(key[1:] > key[:-1]):  # the parts of one cell
        return rows
    order = np.argsort(key, kind="stable")
    if np.all(np.diff(key[order]) > 0):
        return rows.take(order)
    when = numbers_of(rows["committed_at"].cast(pa.int64()))
    order = np.lexsort((when, key))
    last = np.append(key[order][1:] != key[order][:-1], True)
    return rows.take(order[last])


def keys(rows: pa.Table, names: Sequence[str]) -> np.ndarray:
    """A number for each row, int64 [rows], that orders and tells rows apart as these columns do; null comes last."""
    key = np.zeros(rows.num_rows, dtype=np.int64)
    for name in names if rows.num_rows else ():
        column = rows[name].combine_chunks()
        codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode("encode")
        rank = numbers_of(pc.rank(codes.dictionary, tiebreaker="first")).astype(np.int64) - 1
        key = key * len(rank) + rank[numbers_of(codes.indices)]
    return key

"""Parquet files of rows: written whole with a digest, checked when read, and reduced to the newest row per cell and
sample.

A cell is one method at one budget on one dataset. The sha256 of a file, computed with zeros in place of its 64 digits,
is in the footer under `KEY`. So a file may be renamed or sent anywhere, and reading detects any changed byte. Files
without a digest are refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mmkv_bench.errors import StoreError
from mmkv_bench.file_state import State
from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS

KEY = "mmkv_sha256"
_EMPTY_DIGEST = b"0" * 64
# The bytes of the pair in the footer: the key, then (thrift's compact protocol) "string", "64 bytes", the value.
_MARK = KEY.encode() + b"\x18\x40"
WHOLE_FILE_BYTES = 32 << 20
"""Files up to this size are read into memory. Larger files are hashed piece by piece and then read from disk."""
_PIECE_BYTES = 1 << 22
_known: set[State] = set()
"""States of files that this process has hashed."""


class Damaged(ValueError):
    """Raised if a file's bytes are not the bytes that were written."""


def parquet_bytes(table: pa.Table, row_group_size: int | None = None, **options: Any) -> bytes:
    """Return a table as the content of a parquet file, with page checksums and a sha256 in the footer.

    options: passed to `pyarrow.parquet.ParquetWriter`.
    """
    stream = io.BytesIO()
    write_sealed(stream, table.schema, [table], row_group_size, **options)
    return stream.getvalue()


def write_sealed(
    stream: BinaryIO, schema: pa.Schema, tables: Iterable[pa.Table], row_group_size: int | None = None, **options: Any
) -> None:
    """Write `tables` to a stream as one parquet file, with page checksums and a sha256 in the footer.

    Each table starts a new row group.
    """
    sink = _Digesting(stream)
    with pq.ParquetWriter(sink, schema, write_page_checksum=True, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({KEY: _EMPTY_DIGEST.decode()})
        sink.hold()
    sink.seal()


class _Digesting:
    """A stream that hashes all written bytes and holds back the parquet footer until the hash is in it."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest = stream, hashlib.sha256()
        self._footer: bytearray | None = None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        if self._footer is None:
            self._stream.write(data)
        else:
            self._footer += data
        return len(data)

    def hold(self) -> None:
        self._footer = bytearray()

    def seal(self) -> None:
        assert self._footer is not None, "the footer is held before it is written"
        digest_start = self._footer.rindex(_MARK) + len(_MARK)
        self._footer[digest_start : digest_start + 64] = self._digest.hexdigest().encode()
        self._stream.write(self._footer)

    def flush(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def open_checked(path: Path, coded: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """Check a parquet file's sha256 (once per process for an unchanged file), and yield the open file.

    coded: text columns to be read as dictionaries, if the file has them.

    Raises Damaged, OSError, pa.ArrowException.
    """
    with open(path, "rb") as stream:
        state = State.of(os.fstat(stream.fileno()))
        source: Any = stream
        if state not in _known:
            if state.size > WHOLE_FILE_BYTES:
                _check(stream)
                if state != State.of(os.fstat(stream.fileno())):
                    raise Damaged("it was written to while it was read")
            else:
                # The parsed bytes are the hashed bytes, even if the file changes meanwhile.
                file_bytes = stream.read()
                _check(io.BytesIO(file_bytes))
                source = pa.BufferReader(file_bytes)
            if state.settled:
                _known.add(state)
        footer = pq.read_metadata(source)
        columns = {footer.schema.column(place).path for place in range(footer.num_columns)} if coded else set()
        options = {"metadata": footer, "read_dictionary": sorted(columns.intersection(coded))}
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


def number_of_rows(path: Path) -> int:
    """Return the number of rows in a parquet file's footer; 0 for a missing or damaged file."""
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException):
        return 0


def _check(stream: BinaryIO) -> None:
    """Raise Damaged if a file has no sha256 in its footer, or one that does not match."""
    footer_end = stream.seek(0, os.SEEK_END) - 8  # the footer's end; its length and four letters follow
    stream.seek(max(footer_end, 0))
    footer_start = max(footer_end - int.from_bytes(stream.read(4), "little"), 0)
    stream.seek(footer_start)
    mark_place = stream.read().rfind(_MARK)
    if mark_place < 0:
        raise Damaged("it has no checksum: it is cut off, or another program or an older version wrote it")
    bytes_left, digest = footer_start + mark_place + len(_MARK), hashlib.sha256()
    stream.seek(0)
    while bytes_left and (piece := stream.read(min(bytes_left, _PIECE_BYTES))):
        digest.update(piece)
        bytes_left -= len(piece)
    stored_digest = stream.read(64)
    digest.update(_EMPTY_DIGEST + stream.read())
    stream.seek(0)
    if digest.hexdigest().encode() != stored_digest:
        raise Damaged("its bytes are not the bytes that were written: the checksum does not match")


# Rows

ROW_GROUP = 1 << 13  # a part with more rows gets several row groups of about this number of rows
CODED_TEXT = pa.dictionary(pa.int32(), pa.string())
MAX_REMEMBERED_GROUPS = 1 << 18  # limit for the remembered cells of a file's row groups
_cells_of_groups: dict[bytes, dict[int, frozenset[str]]] = {}  # digest of a file -> row group -> cells


def parquet(table: pa.Table) -> Callable[[BinaryIO], object]:
    """Return a function that writes `table` to a stream, for `files.Staged`."""
    return lambda stream: stream.write(parquet_bytes(table, compression="zstd"))


def part(rows: pa.Table) -> Callable[[BinaryIO], object]:
    """Return a function that writes response rows to a stream as a parquet file, for `files.Staged`.

    More than `ROW_GROUP` rows are sorted by cell (in order of first appearance), so that row groups have whole cells.
    """
    if rows.num_rows <= ROW_GROUP:
        return parquet(rows)
    cell_codes = codes_of(dictionary_encoded(rows["cell"]))  # numbered in order of appearance
    row_order = np.argsort(cell_codes, kind="stable")
    rows_by_cell = rows.take(column_of(row_order))
    row_groups = [rows_by_cell.slice(start, end - start) for start, end in runs(cell_codes[row_order], ROW_GROUP)]
    return lambda stream: write_sealed(stream, rows.schema, row_groups, compression="zstd")


def runs(codes: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """Return (start, end) of slices of about `rows` rows that split no cell. codes: each row's cell number, sorted."""
    cell_ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes))
    slice_ends = cell_ends[np.searchsorted(cell_ends, np.arange(rows, len(codes), rows))]
    return list(pairwise(np.unique([0, *slice_ends.tolist(), len(codes)]).tolist()))


def schema_of_columns(table: str, columns: Sequence[str], coded: bool = False) -> pa.Schema:
    """Return the schema of some columns of a table. coded: with dictionary-encoded text columns."""
    fields = (SCHEMAS[table].field(name) for name in columns)
    return pa.schema(
        [field.with_type(CODED_TEXT) if coded and field.type == pa.string() else field for field in fields]
    )


def no_rows(schema: pa.Schema) -> pa.Table:
    """Return an empty table. (`Schema.empty_table` imports pandas, see `column_of`.)"""
    return pa.Table.from_batches([], schema)


def column_of(values: np.ndarray) -> pa.Array:
    """Return numbers as a pyarrow array, without a copy.

    `pyarrow.array` would import pandas, which takes longer than reading most stores.
    """
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def numbers_of(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Convert a column of numbers without nulls to NumPy. (`to_numpy` imports pandas, see `column_of`.)"""
    if not len(column):
        return np.zeros(0, str(column.type))
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        raise ValueError("a column of numbers has nulls")
    return np.frombuffer(array.buffers()[1], str(array.type))[array.offset : array.offset + len(array)]


_NO_PLACE = column_of(np.array([-1], np.int32))[0]
"""The scalar -1, which replaces null. (`pyarrow.scalar` imports pandas, see `column_of`.)"""


def dictionary_encoded(column: pa.ChunkedArray | pa.Array) -> pa.DictionaryArray:
    """Return a text column as a dictionary-encoded array in one chunk."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if pa.types.is_dictionary(array.type) else array.dictionary_encode()


def codes_of(codes: pa.DictionaryArray) -> np.ndarray:
    """Return each row's index in the dictionary, int64 [rows]; -1 for null."""
    return numbers_of(pc.fill_null(codes.indices, _NO_PLACE)).astype(np.int64)


def texts_of(values: list[str]) -> pa.Array:
    """Return texts as a pyarrow array without importing pandas. The texts may take at most 2 GiB."""
    encoded = [value.encode() for value in values]
    text_ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(text_ends), pa.py_buffer(b"".join(encoded)))


def is_in(column: pa.ChunkedArray, texts: pa.Array) -> pa.ChunkedArray:
    """Tell for each row of a text column, dictionary-encoded or not, whether it is among `texts`: bool [rows]."""
    if not pa.types.is_dictionary(column.type):
        return pc.is_in(column, value_set=texts)
    masks = [pc.is_in(chunk.dictionary, value_set=texts).take(chunk.indices) for chunk in column.chunks]
    return pa.chunked_array(masks, pa.bool_())


def texts_in(column: pa.ChunkedArray, wanted: Callable[[str], bool]) -> pa.ChunkedArray:
    """Apply `wanted` once per distinct text of a dictionary-encoded column. Return a mask, bool [rows]."""
    return is_in(column, texts_of([text for text in dictionary_encoded(column).dictionary.to_pylist() if wanted(text)]))


def places(column: pa.ChunkedArray, texts: pa.Array) -> np.ndarray:
    """Return the index of each row's text in `texts`, which are distinct, int64 [rows]; -1 if missing."""
    coded_column = dictionary_encoded(column)
    place_of_text = numbers_of(pc.fill_null(pc.index_in(coded_column.dictionary, value_set=texts), _NO_PLACE))
    return np.append(place_of_text, -1).astype(np.int64)[codes_of(coded_column)]


def read_file(
    path: Path, schema: pa.Schema, cells: Collection[str] | None = None, metrics: Collection[str] | None = None
) -> pa.Table:
    """Return the rows of one parquet file, with the columns of `schema`.

    Args:
        cells, metrics: if given, only rows of these cells and metrics. Row groups without such a row are not decoded.

    Raises:
        FileNotFoundError: the file is gone.
        StoreError: the file is damaged, unreadable or of another schema version.
    """
    wanted_texts = {name: texts for name, texts in (("cell", cells), ("metric", metrics)) if texts is not None}
    coded_columns = sorted({*wanted_texts, *(field.name for field in schema if field.type == CODED_TEXT)})
    with readable(path), open_checked(path, coded_columns) as file:
        column_names = _columns_in(file, [*schema.names, *wanted_texts])
        return _as(
            path,
            _chosen_rows(path, file, column_names, wanted_texts) if wanted_texts else file.read(column_names),
            schema,
        )


def read_by_group(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of one parquet file, one row group at a time. Raises the errors of `read_file`."""
    with readable(path), open_checked(path) as file:
        column_names = _columns_in(file, schema.names)
        for number in range(file.num_row_groups):
            yield _as(path, file.read_row_group(number, column_names), schema)


def _columns_in(file: pq.ParquetFile, columns: Iterable[str]) -> list[str]:
    """Return the columns of a file that are `schema_version` or in `columns`."""
    columns_of_file = set(file.schema_arrow.names)
    return [name for name in dict.fromkeys(["schema_version", *columns]) if name in columns_of_file]


def _as(path: Path, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows in the form of `schema`, with nulls for missing nullable columns. path: for messages."""
    _check_version(path, rows)
    columns_of_rows = set(rows.column_names)
    for field in schema:
        if field.name not in columns_of_rows and field.nullable:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select(schema.names).cast(schema)


def _chosen_rows(path: Path, file: pq.ParquetFile, names: list[str], wanted: Mapping[str, Collection[str]]) -> pa.Table:
    """Return the rows of a file whose text in each column of `wanted` is among that column's wanted texts.

    Row groups are read one at a time to save memory. The process remembers the cells of each row group, because scoring
    and packing read a few cells at a time.

    names: the columns to return.
    """
    wanted_arrays = {column: texts_of(list(values)) for column, values in wanted.items()}
    only_cells_wanted = [*wanted] == ["cell"]
    cells_by_group = _cells_of_groups.setdefault(file.metadata.metadata[KEY.encode()], {}) if only_cells_wanted else {}
    tables = [file.read_row_groups([], names)]
    for number in range(file.num_row_groups):
        if number in cells_by_group:
            has_wanted_rows = not cells_by_group[number].isdisjoint(wanted["cell"])
        else:
            filter_columns = file.read_row_group(number, ["schema_version", *wanted])
            _check_version(path, filter_columns)
            if only_cells_wanted and sum(map(len, cells_by_group.values())) < MAX_REMEMBERED_GROUPS:
                cells_by_group[number] = frozenset(map(sys.intern, filter_columns["cell"].unique().to_pylist()))
            has_wanted_rows = all(
                pc.any(is_in(filter_columns[column], values), min_count=0).as_py()
                for column, values in wanted_arrays.items()
            )
        if has_wanted_rows:
            rows = file.read_row_group(number, names)
            for column, values in wanted_arrays.items():
                rows = rows.filter(is_in(rows[column], values))
            tables.append(rows)
    return pa.concat_tables(tables)


def _check_version(path: Path, rows: pa.Table) -> None:
    versions = numbers_of(rows["schema_version"])
    if (versions != SCHEMA_VERSION).any():
        refuse_version(path, int(versions[versions != SCHEMA_VERSION][0]))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn exceptions from reading a damaged file into a StoreError that names the file. FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (Damaged, pa.ArrowException, OSError, KeyError, ValueError) as problem:
        raise StoreError(
            f"{path} is not a readable part of a result store ({problem}). Restore it from a copy, or move it "
            "away: rows that only this file holds are then made again."
        ) from problem


def refuse_version(where: Path, version: object) -> None:
    """Raise StoreError because the rows at `where` have another schema version."""
    raise StoreError(
        f"{where} was written under row schema version {version}, but this program uses version {SCHEMA_VERSION}. "
        "Use another result folder, or the version of mmkv_bench that wrote this one."
    )


def newest(rows: pa.Table, unit: Sequence[str] = ("cell", "sample_id")) -> pa.Table:
    """Return the last committed row of each group of rows with equal columns `unit`, sorted by these columns.

    If commit times are equal, the later row counts.
    """
    key = keys(rows, unit)
    if np.all(key[1:] > key[:-1]):  # the parts of one cell
        return rows
    row_order = np.argsort(key, kind="stable")
    if np.all(np.diff(key[row_order]) > 0):
        return rows.take(row_order)
    commit_times = numbers_of(rows["committed_at"].cast(pa.int64()))
    row_order = np.lexsort((commit_times, key))
    is_last_of_unit = np.append(key[row_order][1:] != key[row_order][:-1], True)
    return rows.take(row_order[is_last_of_unit])


def keys(rows: pa.Table, names: Sequence[str]) -> np.ndarray:
    """Return a number per row, int64 [rows], ordered as the tuples of the row's values in `names`, nulls last."""
    key = np.zeros(rows.num_rows, dtype=np.int64)
    for name in names if rows.num_rows else ():
        column = rows[name].combine_chunks()
        coded_column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode("encode")
        rank_of_text = numbers_of(pc.rank(coded_column.dictionary, tiebreaker="first")).astype(np.int64) - 1
        key = key * len(rank_of_text) + rank_of_text[numbers_of(coded_column.indices)]
    return key

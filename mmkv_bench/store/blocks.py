"""The cells of a large store, some at a time: the rows of all of them fit into no memory.

A reader that takes some cells at a time from files that hold all cells reads every file for every block of them, which is
more than linear in rows. `regrouped` reads each file once: rows wait in memory as files are read; some hundred megabytes at
a time they are sorted by cell and go to a file without a name, which is gone with the process however that ends. A block of
cells is then a few batches of each such lot.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from mmkv_bench.errors import StoreError
from mmkv_bench.store.parts import codes_of, column_of, is_in, no_rows, places, readable, runs, texts_of
from mmkv_bench.store.sealed import opened


def counted(path: Path) -> dict[str, int]:
    """Cell -> how many rows of it a file holds. Raises FileNotFoundError, StoreError."""
    counts: dict[str, int] = {}
    with readable(path), opened(path, ["cell"]) as (file, _):
        for group in range(file.num_row_groups):
            for codes in file.read_row_group(group, ["cell"])["cell"].chunks:
                in_chunk = np.bincount(codes_of(codes), minlength=len(codes.dictionary)).tolist()
                for name, count in zip(codes.dictionary.to_pylist(), in_chunk, strict=True):
                    counts[name] = counts.get(name, 0) + count
    return {name: count for name, count in counts.items() if count}


Name = TypeVar("Name", str, int)


def blocks(names: Iterable[Name], counts: Mapping[Name, int], at_once: int) -> Iterator[list[Name]]:
    """The cells, or what else is named, in their order: as many at a time as have `at_once` rows together by `counts`, or one
    that has more."""
    block: list[Name] = []
    waiting = 0
    for name in names:
        rows = counts.get(name, 0)
        if block and waiting + rows > at_once:
            yield block
            block, waiting = [], 0
        block.append(name)
        waiting += rows
    if block:
        yield block


LOT = 256 << 20
"""Bytes of rows that are sorted together; sorting takes as much again, and so may the last table that came."""
BATCH = 1 << 10
"""Rows after which a batch ends, with the cell that it is at."""


@contextmanager
def regrouped(
    folder: Path, schema: pa.Schema, rows: Iterable[pa.Table], cells: Sequence[str]
) -> Iterator[RegroupedBlocks]:
    """The rows of `cells`, to be asked for in their order, some neighbours at a time.

    Args:
        folder: where there is room for all rows, some two and a half times what they take as parts and many times what packed
            ones do; it is free again at the end.
        rows: as they come, of any cells and in any number of tables of this schema.

    Raises:
        OSError: the disk is full or refuses.
    """
    with tempfile.TemporaryFile(dir=folder, prefix=".", suffix=".tmp") as file:
        yield RegroupedBlocks(file, schema, rows, cells)


class _Batch(NamedTuple):
    """Rows in the file: the places of the first and the last cell, where they begin, how long they are, their checksum."""

    first: int
    last: int
    start: int
    length: int
    crc: int


class RegroupedBlocks:
    """See `regrouped`."""

    def __init__(self, file: IO[bytes], schema: pa.Schema, rows: Iterable[pa.Table], cells: Sequence[str]) -> None:
        self._file, self._schema, self._cells = file, schema, list(cells)
        self._place = {cell: place for place, cell in enumerate(cells)}
        self._batches = [batch for lot in _lots(rows) for batch in self._written(lot)]
        file.flush()

    def of(self, cells: Sequence[str]) -> pa.Table:
        """The rows of these cells, neighbours in the order; those of a cell in the order in which they came.

        Raises StoreError where the disk gives back other bytes than it was given.
        """
        first, last = self._place[cells[0]], self._place[cells[-1]]
        assert last - first == len(cells) - 1, "cells that stand together"
        batches = [self._read(batch) for batch in self._batches if batch.first <= last and batch.last >= first]
        rows = pa.concat_tables([no_rows(self._schema), *batches])
        return rows.filter(is_in(rows["cell"], texts_of(list(cells))))

    def _written(self, lot: pa.Table) -> Iterator[_Batch]:
        place = places(lot["cell"], texts_of(self._cells))
        order = np.argsort(place, kind="stable")
        order = order[np.count_nonzero(place < 0) :]  # others' rows
        for start, end in runs(place[order], BATCH):
            data = _stream(lot.take(column_of(order[start:end])))
            first, last = (int(place[order[row]]) for row in (start, end - 1))
            yield _Batch(first, last, self._file.tell(), len(data), zlib.crc32(data))
            self._file.write(data)

    def _read(self, batch: _Batch) -> pa.Table:
        self._file.seek(batch.start)
        data = self._file.read(batch.length)
        if zlib.crc32(data) != batch.crc:
            raise StoreError("A temporary file failed its checksum. The store is unchanged; check the disk.")
        return pa.ipc.open_stream(data).read_all()


def _stream(rows: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(rows)
    return memoryview(sink.getvalue())


def _lots(rows: Iterable[pa.Table]) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    size = 0
    for table in rows:
        waiting.append(table)
        size += table.nbytes
        if size >= LOT:
            lot, waiting, size = _in_one_piece(waiting), [], 0
            yield lot
    if waiting:
        yield _in_one_piece(waiting)


def _in_one_piece(tables: Sequence[pa.Table]) -> pa.Table:
    """In one piece: whoever takes rows of many copies all of them every time."""
    return pa.concat_tables(tables).combine_chunks()

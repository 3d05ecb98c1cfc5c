"""Rows of many files, cells after cells, each file read once: who reads some cells at a time from files that hold all cells
reads every file for every block of them, which is more than linear in rows.

Rows wait in memory as files are read. Some hundred megabytes at a time they are sorted by cell and go to a file without a
name, which is gone with the process however that ends. A block of cells is then a few batches of each such lot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.store.parts import column_of, places, runs

LOT = 256 << 20
"""Bytes of rows in memory that are sorted together."""
BATCH = 1 << 10
"""Rows of a batch, or those that a lot has of a cell: what is read for a cell has no more rows of its neighbours."""


@contextmanager
def regrouped(folder: Path, schema: pa.Schema, rows: Iterable[pa.Table], cells: Sequence[str]) -> Iterator[Regrouped]:
    """The rows of `cells`, to be asked for in their order, some neighbours at a time.

    Args:
        folder: where there is room for all rows, compressed; what they take is free again at the end.
        rows: as they come, of any cells and in any number of tables of this schema.

    Raises:
        OSError: the disk is full or refuses.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        yield Regrouped(file, schema, rows, cells)


class Regrouped:
    """See `regrouped`."""

    def __init__(self, file: IO[bytes], schema: pa.Schema, rows: Iterable[pa.Table], cells: Sequence[str]) -> None:
        self._schema, self._cells = schema, pa.array(cells, pa.string())
        self._place = {cell: place for place, cell in enumerate(cells)}
        self._ends: list[tuple[int, int]] = []  # of each batch the places of its first and its last cell
        with pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            for lot in _lots(rows):
                self._write(writer, lot)
        file.flush()
        self._reader = pa.ipc.open_file(pa.PythonFile(file, mode="r"))

    def of(self, cells: Sequence[str]) -> pa.Table:
        """The rows of these cells, neighbours in the order; those of a cell in the order in which they came."""
        first, last = self._place[cells[0]], self._place[cells[-1]]
        assert last - first == len(cells) - 1, "cells that stand together"
        batches = [
            self._reader.get_batch(number)
            for number, (start, end) in enumerate(self._ends)
            if start <= last and end >= first
        ]
        found = pa.Table.from_batches(batches, self._schema)
        return found.filter(pc.is_in(found["cell"], value_set=self._cells.slice(first, len(cells))))

    def _write(self, writer: pa.RecordBatchWriter, lot: pa.Table) -> None:
        lot = lot.combine_chunks()
        place = places(lot["cell"], self._cells)
        order = np.argsort(place, kind="stable")
        order = order[np.count_nonzero(place < 0) :]  # others' rows
        for start, end in runs(place[order], BATCH):
            for batch in lot.take(column_of(order[start:end])).to_batches():
                writer.write_batch(batch)
                self._ends.append((int(place[order[start]]), int(place[order[end - 1]])))


def _lots(rows: Iterable[pa.Table]) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    size = 0
    for table in rows:
        waiting.append(table)
        size += table.nbytes
        if size >= LOT:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)

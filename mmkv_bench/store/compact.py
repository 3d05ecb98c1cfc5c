"""Compaction of a store: rewrite the many files that runs write as a few large files per table, ready to publish.

A cell is one method at one budget on one dataset. Rows belong to cells.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.secrecy import REDACTED
from mmkv_bench.store import parts
from mmkv_bench.store.files import checksum, disk_errors, sync_folder, write_bytes
from mmkv_bench.store.packing import (
    DENSEST_LEVEL,
    LARGEST_FILE,
    QUICK_LEVEL,
    in_cell_order,
    is_packed,
    packed,
    similarity_order,
    sort_by_cell,
)
from mmkv_bench.store.packing import slim as slimmed
from mmkv_bench.store.parts import column_of, is_in, newest, no_rows, places, read_by_group, runs, texts_of
from mmkv_bench.store.schema import CELL_COLUMNS, SCHEMAS
from mmkv_bench.store.score_files import is_batch
from mmkv_bench.store.store import Store

_IDENTITY_COLUMNS = [column.name for column in CELL_COLUMNS if column.identity and column.name != "method_version"]


def outdated_cells(store: Store, cells: pa.Table) -> set[str]:
    """Return the hashes of outdated cells.

    A cell is outdated if the same configuration under a newer `method_version` has scores and a row for each of the
    cell's samples. Cells whose columns had a secret removed are never outdated, because they may differ in the secret.

    cells: the whole table `cells`, one row per cell.
    """
    versions_by_configuration: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for row in cells.select([*_IDENTITY_COLUMNS, "method_version", "cell"]).to_pylist():
        configuration = tuple(row[name] for name in _IDENTITY_COLUMNS)
        if REDACTED not in str(configuration):
            versions_by_configuration.setdefault(configuration, []).append((row["method_version"] or 1, row["cell"]))
    cells_with_several_versions = [
        sorted(group) for group in versions_by_configuration.values() if len({version for version, _ in group}) > 1
    ]
    cells_with_versions = {cell for versions in cells_with_several_versions for _, cell in versions}
    if not cells_with_versions:
        return set()
    samples_by_cell = store.done(cells_with_versions)
    scored_cells = set(store.metrics(cells_with_versions, ["cell"])["cell"].to_pylist())
    return {
        old
        for versions in cells_with_several_versions
        for version, old in versions
        if any(
            newer > version and new in scored_cells and samples_by_cell[new] >= samples_by_cell[old]
            for newer, new in versions
        )
    }


ROWS_AT_ONCE = 1 << 17
"""Tables of `responses` and `samples` with more rows are packed a few cells at a time."""
BYTES_IN_MEMORY = 160 << 20
"""Target for the bytes of rows in memory in that case."""


def pack(store: Store, slim: bool = False) -> int:
    """Rewrite a store's tables as few parquet files, each below 10 MB, and remove the files that they replace.

    Reading gives the same rows as before. Later writes add files beside the packed ones.

    Args:
        slim: remove the values of response rows that `schema.SLIM` lists, as for rows in git. Only running the cells
            again restores them.

    Returns:
        The number of outdated cells (see `outdated_cells`), whose rows were dropped.

    Raises:
        StoreError: samples are still in journals.
    """
    store.check_version()
    store.remove_stale_files()
    with disk_errors("packing", store.root), store.locked():
        return _pack(store, slim)


def _pack(store: Store, slim: bool) -> int:
    if store.journals():
        raise StoreError(
            f"{store.root} has samples in journals, because a run is writing or was interrupted; let the run "
            "finish (the same command continues it), then pack; copy a folder on a file system without locks to one with "
            "locks, and continue there"
        )
    # Listed before the rows are read: a file that a run adds in between stays.
    cell_files = store.files("cells")
    cells = store.cells()
    order, dropped = similarity_order(cells), outdated_cells(store, cells)
    for table in ("metrics", "samples", "timings", "responses", "cells"):  # cells last: no row is ever without its cell
        old_files = cell_files if table == "cells" else store.files(table)
        packing = _Packing(store, table, cells, order, dropped, slim and table == "responses")
        if packing.large(old_files):
            with closing(packing.by_cells(old_files)) as files:
                _replace(store.root / table, old_files, files)
        elif (rows := packing.rows(None)).num_rows:
            _replace(store.root / table, old_files, packing.files(rows))
    _pack_diagnostics(store)
    return len(dropped)


def _pack_diagnostics(store: Store) -> None:
    """Pack the table `diagnostics`, whose rows belong to no cell. Rows of one measurement are stored together."""
    old_files = store.files("diagnostics")
    rows = store.diagnostics()
    if rows.num_rows:
        rows = rows.sort_by([(name, "ascending") for name in ("name", "model", "dataset", "measurement")])
        _replace(store.root / "diagnostics", old_files, packed(rows, together="measurement"))


class _Packing:
    """Makes the packed files of one table.

    cells: the table `cells`.
    order: cell hashes in the order of packed files.
    dropped: hashes of cells whose rows are left out.
    slim: whether the values of `schema.SLIM` are removed.
    """

    def __init__(
        self, store: Store, table: str, cells: pa.Table, order: list[str], dropped: set[str], slim: bool
    ) -> None:
        self._store, self._table, self._order, self._dropped, self._slim = store, table, order, dropped, slim
        reader_by_table = {"responses": store.responses, "timings": store.timings, "cells": lambda _: cells}
        self._read: Callable[..., pa.Table] = reader_by_table.get(table, partial(store.load, table))
        self._counts = partial(store.counts, table)

    def large(self, files: list[Path]) -> bool:
        """Tell whether the table (in `files`) is packed a few cells at a time."""
        return self._table in ("responses", "samples") and sum(map(parts.number_of_rows, files)) > ROWS_AT_ONCE

    def rows(self, names: list[str] | None) -> pa.Table:
        """Return the table's rows of the cells `names` (None: all), without dropped cells."""
        rows = self._read(names)
        if self._dropped:
            rows = rows.filter(pc.invert(pc.is_in(rows["cell"], value_set=pa.array(sorted(self._dropped)))))
        return rows

    def files(self, rows: pa.Table, level: int = DENSEST_LEVEL) -> list[bytes]:
        return packed(sort_by_cell(slimmed(rows) if self._slim else rows, self._order), level=level)

    def by_cells(self, before: Sequence[Path]) -> Generator[bytes]:
        """Yield the contents of packed files. Each step reads as many cells as should fill one file.

        before: the table's present files.
        """
        rows_by_cell = self._counts()
        cells_to_pack = [name for name in in_cell_order(rows_by_cell, self._order) if name not in self._dropped]
        rows_per_step = float(ROWS_AT_ONCE)
        with self._by_some(cells_to_pack, before) as read:
            while cells_to_pack:
                cumulative_rows = np.cumsum([rows_by_cell[name] for name in cells_to_pack])
                cells_in_step = max(1, int(np.searchsorted(cumulative_rows, rows_per_step, side="right")))
                rows = read(cells_to_pack[:cells_in_step])
                cells_to_pack = cells_to_pack[cells_in_step:]
                if rows.num_rows:
                    packed_files = self.files(rows, QUICK_LEVEL)
                    yield from packed_files
                    rows_per_step = rows.num_rows * min(
                        BYTES_IN_MEMORY / rows.nbytes, 0.95 * LARGEST_FILE / sum(map(len, packed_files))
                    )

    @contextmanager
    def _by_some(self, cells: list[str], before: Sequence[Path]) -> Iterator[Callable[[list[str]], pa.Table]]:
        """Yield a function that maps adjacent cell hashes to their rows.

        Unpacked files of `responses` mix cells, so their rows are first sorted by cell in a temporary file.

        before: the table's present files.
        """
        if self._table != "responses":
            yield self.rows
            return
        packed_files, columns = [path for path in before if is_packed(path)], SCHEMAS[self._table].names
        rows = (group for path in sorted(before) if not is_packed(path) for group in self._groups(path))
        with tempfile.TemporaryFile(dir=self._store.root / self._table, prefix=".", suffix=".tmp") as file:
            groups = RegroupedBlocks(file, SCHEMAS[self._table], rows, cells)
            yield lambda names: newest(
                pa.concat_tables(
                    [self._store.read(self._table, lambda: packed_files, columns, set(names)), groups.of(names)]
                )
            )

    def _groups(self, path: Path) -> Iterator[pa.Table]:
        try:
            yield from read_by_group(path, SCHEMAS[self._table])
        except FileNotFoundError:
            raise StoreError(
                f"{path} vanished while it was packed: is another program packing or removing files? No row of "
                "that file was packed; pack again when the other program has ended."
            ) from None


BYTES_PER_LOT = 256 << 20
"""Bytes of rows that are sorted together. Sorting needs the same amount again, and the last table may add to it."""
ROWS_PER_BATCH = 1 << 10
"""A batch ends with the first cell that ends after this number of rows."""


class _Batch(NamedTuple):
    """Sorted rows in a temporary file: places of first and last cell in the order, start and bytes, and CRC-32."""

    first: int
    last: int
    start: int
    length: int
    crc: int


class RegroupedBlocks:
    """An external sort of rows by cell, for rows that do not fit into memory.

    Input tables are read once, sorted by cell in lots of `BYTES_PER_LOT`, and written to a temporary file in batches.

    Args:
        file: an unnamed temporary file. It needs space for all rows: about 2.5 times the size of parquet parts, and
            many times the size of packed files.
        schema: schema of the tables in `rows`.
        rows: tables with rows of any cells in any order.
        cells: the order of the cells. Rows of other cells are ignored.

    Raises:
        OSError: the disk is full or refuses.
    """

    def __init__(self, file: IO[bytes], schema: pa.Schema, rows: Iterable[pa.Table], cells: Sequence[str]) -> None:
        self._file, self._schema, self._cells = file, schema, texts_of(list(cells))
        self._place = {cell: place for place, cell in enumerate(cells)}
        self._batches: list[_Batch] = []
        unsorted_tables: list[pa.Table] = []
        for table in rows:
            unsorted_tables.append(table)
            if sum(part.nbytes for part in unsorted_tables) >= BYTES_PER_LOT:
                self._write(unsorted_tables)
        self._write(unsorted_tables)
        file.flush()

    def of(self, cells: Sequence[str]) -> pa.Table:
        """Return the rows of `cells`, which are consecutive in the cell order. Rows of a cell keep their input order.

        Raises StoreError if the temporary file fails its checksum.
        """
        first_place, last_place = self._place[cells[0]], self._place[cells[-1]]
        assert last_place - first_place == len(cells) - 1, "cells that stand together"
        batches = [
            self._read(batch) for batch in self._batches if batch.first <= last_place and batch.last >= first_place
        ]
        rows = pa.concat_tables([no_rows(self._schema), *batches])
        return rows.filter(is_in(rows["cell"], texts_of(list(cells))))

    def _write(self, waiting: list[pa.Table]) -> None:
        """Sort the rows in `waiting` by cell, write them in batches, and empty `waiting`."""
        # In one piece: taking rows from many chunks copies all chunks every time.
        lot = pa.concat_tables([no_rows(self._schema), *waiting]).combine_chunks()
        waiting.clear()
        cell_places = places(lot["cell"], self._cells)
        row_order = np.argsort(cell_places, kind="stable")
        row_order = row_order[np.count_nonzero(cell_places < 0) :]  # without the rows of other cells
        for start, end in runs(cell_places[row_order], ROWS_PER_BATCH) if len(row_order) else ():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self._schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
                writer.write_table(lot.take(column_of(row_order[start:end])))
            batch_bytes = memoryview(sink.getvalue())
            first_place, last_place = (int(cell_places[row_order[row]]) for row in (start, end - 1))
            self._batches.append(
                _Batch(first_place, last_place, self._file.tell(), len(batch_bytes), zlib.crc32(batch_bytes))
            )
            self._file.write(batch_bytes)

    def _read(self, batch: _Batch) -> pa.Table:
        self._file.seek(batch.start)
        batch_bytes = self._file.read(batch.length)
        if zlib.crc32(batch_bytes) != batch.crc:
            raise StoreError("A temporary file failed its checksum. The store is unchanged; check the disk.")
        return pa.ipc.open_stream(batch_bytes).read_all()


def _replace(folder: Path, before: list[Path], files: Iterable[bytes]) -> None:
    """Write the contents `files` as packed files into `folder`, then remove the files `before` that they replace.

    If the process is killed, the folder stays readable. Files are removed in an order in which outdated rows stay
    hidden.
    """
    placed_paths = set()
    for data in files:
        path = folder / f"packed-{checksum(data)}.parquet"
        write_bytes(path, data)
        placed_paths.add(path)
    replaced_paths = [path for path in before if path not in placed_paths]
    for path in sorted(replaced_paths, key=lambda path: (is_batch(path), not is_packed(path), path.name)):
        path.unlink(missing_ok=True)
    sync_folder(folder)

"""Precedence among the files of `cells`, `samples` and `metrics`, several of which may have rows of one cell (a method
at a budget).

Scores that were written together (batches) come first, the newest before older ones. Then comes a cell's own file, then
packed files. A cell's rows in one file hide its rows in all later files.

A batch is one file `together-<countdown>-<id>.parquet` in each of `samples/` and `metrics/`, because thousands of
small, synced files are slow. The file in `metrics/` is placed first and counts only while the one in `samples/` exists,
so both appear in one step. The newest batch has the smallest countdown.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mmkv_bench.errors import StoreError
from mmkv_bench.file_state import State, state_of
from mmkv_bench.store import parts
from mmkv_bench.store.files import Staged, sync_folder
from mmkv_bench.store.packing import blocks, is_packed
from mmkv_bench.store.parts import open_checked, write_sealed
from mmkv_bench.store.rows import safe_name
from mmkv_bench.store.schema import SCHEMAS

AT_ONCE = 1 << 20
"""Limit for the scores of a metric in memory while metrics are computed from them."""

ROW_GROUP = 1 << 20
_PREFIX = "together-"
_WAITING_NAME = f"{_PREFIX}waiting"
_EMPTY_KEY = b"cells_without_scores"
"""Metadata key of a `samples` batch file: the cells that lose all scores by this batch."""

_known_batches: dict[State, frozenset[str]] = {}
"""State of each batch file that this process has read, to the cells that the batch replaces."""


def is_batch(path: Path) -> bool:
    return path.name.startswith(_PREFIX)


def batch_files(root: Path, table: str) -> list[Path]:
    """List the batch files of a table, the newest first. A file in `metrics/` needs its counterpart in `samples/`."""
    batches = sorted(filter(is_batch, table_files(root, table)))
    return [path for path in batches if table != "metrics" or (root / "samples" / path.name).exists()]


def cells_of_batch(root: Path, name: str) -> set[str]:
    """Return the cells whose scores the batch `name` replaces, with those that have no scores left.

    Raises FileNotFoundError, StoreError.
    """
    path = root / "samples" / name
    with parts.readable(path):
        state = state_of(path)
    if state not in _known_batches:
        with parts.readable(path), open_checked(path, ["cell"]) as file:
            cells = set(json.loads((file.schema_arrow.metadata or {}).get(_EMPTY_KEY, b"[]")))
            for group in range(file.num_row_groups):
                for chunk in file.read_row_group(group, ["cell"])["cell"].chunks:
                    cells.update(chunk.dictionary.to_pylist())
        if not state.settled:
            return cells
        _known_batches[state] = frozenset(cells)
    return set(_known_batches[state])


def write_batch(root: Path, tables: Mapping[str, pa.Table], cells: set[str]) -> None:
    """Replace all scores of `cells` by new rows, in one step. tables: `samples` and `metrics` to their checked rows."""
    cells_without_scores = sorted(cells.difference(tables["samples"]["cell"].unique().to_pylist()))
    samples = tables["samples"].replace_schema_metadata(
        {_EMPTY_KEY: json.dumps(cells_without_scores)} if cells_without_scores else None
    )
    with (
        Staged(root / "metrics" / _WAITING_NAME, parts.parquet(tables["metrics"])) as metrics_file,
        Staged(root / "samples" / _WAITING_NAME, parts.parquet(samples)) as samples_file,
    ):
        place_batch(root, {"metrics": metrics_file, "samples": samples_file}, cells)


def place_batch(root: Path, staged: Mapping[str, Staged], cells: set[str]) -> None:
    """Give the files of a batch their final names, so that they replace all scores of `cells` in one step.

    staged: `samples` and `metrics` to the file written under a hidden name.
    """
    older_batches = batch_files(root, "samples")
    # Newer than all existing batches, even if the clocks of two machines differ.
    countdown = min([10**20 - time.time_ns(), *(int(path.name.split("-")[1]) - 1 for path in older_batches[:1])])
    name = f"{_PREFIX}{countdown:020d}-{uuid.uuid4().hex[:8]}.parquet"
    for table in ("metrics", "samples"):
        staged[table].final = root / table / name
        staged[table].place()
    _clear(root, name, cells)


class GrowingScoreFile:
    """A hidden file of `samples` rows (a metric's value for one sample) that is written block by block.

    blocks: checked rows. All rows of a cell are in one block.
    beside: cells with which other cells are compared, so `by_metric` adds their rows.
    cells: all cells that have rows so far.
    """

    def __init__(self, root: Path, blocks: Iterable[pa.Table], beside: Collection[str] = ()) -> None:
        self.cells: set[str] = set()
        self._beside = set(beside)
        self._groups: dict[str, list[_Group]] = {}
        self._written = 0
        schema = SCHEMAS["samples"]
        self.staged = Staged(
            root / "samples" / _WAITING_NAME,
            lambda stream: write_sealed(stream, schema, self._by_metric(blocks), ROW_GROUP, compression="zstd"),
        )

    def _by_metric(self, blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for block in blocks:
            cells = set(block["cell"].unique().to_pylist())
            self.cells |= cells
            for metric in block["metric"].unique().to_pylist():
                rows = block.filter(pc.equal(block["metric"], metric))
                group_numbers = range(self._written, self._written + -(-rows.num_rows // ROW_GROUP))
                self._groups.setdefault(metric, []).append(_Group(group_numbers, rows.num_rows, cells))
                self._written = group_numbers.stop
                yield rows

    def by_metric(self) -> Iterator[tuple[pa.Table, set[str]]]:
        """Yield each metric's rows and their cells. A metric with many rows is split by cell.

        Rows of the cells `beside` from other parts are added to each part, but these cells are not in its set. Text
        columns are dictionary-encoded; `schema_version` and `dataset` are left out.
        """
        text_columns = [field.name for field in SCHEMAS["samples"] if pa.types.is_string(field.type)]
        column_names = [name for name in SCHEMAS["samples"].names if name not in ("schema_version", "dataset")]
        with pq.ParquetFile(self.staged.hidden, read_dictionary=text_columns) as file:  # just written by this process
            for _, groups in sorted(self._groups.items()):
                numbers = range(len(groups))
                for piece in blocks(numbers, {number: groups[number].rows for number in numbers}, AT_ONCE):
                    rows = [
                        file.read_row_groups([at for number in piece for at in groups[number].places], column_names)
                    ]
                    for number in numbers:
                        if number not in piece and (beside := groups[number].cells & self._beside):
                            compared_rows = file.read_row_groups([*groups[number].places], column_names)
                            rows.append(
                                compared_rows.filter(parts.is_in(compared_rows["cell"], parts.texts_of(sorted(beside))))
                            )
                    yield pa.concat_tables(rows), set().union(*(groups[number].cells for number in piece))


class _Group(NamedTuple):
    """The rows of one metric in a block: their row groups in the file, the number of rows, and their cells."""

    places: range
    rows: int
    cells: set[str]


def _clear(root: Path, name: str, cells: set[str]) -> None:
    """Remove files that the batch `name` replaces: own files of `cells`, and older batches of no other cells."""
    for table in ("samples", "metrics"):
        for path in (root / table).glob("*.parquet"):
            if path.stem in cells:
                path.unlink(missing_ok=True)
    for path in batch_files(root, "samples"):
        if path.name > name and cells >= cells_of_batch(root, path.name):
            (root / "metrics" / path.name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    for table in ("samples", "metrics"):
        sync_folder(root / table)


Read = Callable[..., pa.Table]
"""Type of `StoreFolder.read`, which reads columns of all files that a function lists."""


def table_files(root: Path, table: str) -> list[Path]:
    folder = root / table
    try:
        file_names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in file_names if name.endswith(".parquet") and not name.startswith(".")]


def own_file(root: Path, table: str, cell: str) -> Path:
    return root / table / f"{safe_name('cell', cell)}.parquet"


def packed_files(root: Path, table: str) -> list[Path]:
    return sorted(path for path in table_files(root, table) if is_packed(path))


def current_rows(
    root: Path,
    table: str,
    columns: Sequence[str],
    cells: set[str] | None,
    read: Read,
    metrics: Collection[str] | None = None,
) -> pa.Table:
    """Return the rows of `cells`, `samples` or `metrics` that no other file hides.

    columns: names of columns, with `cell` among them.
    cells, metrics: if given, only rows of these cells and metrics.
    read: reads some columns of a list of files.
    """
    read_all = read  # without the selection: all rows of a file decide which other rows it hides

    def named(rows: pa.Table, list_files: Callable[[], list[Path]], of: Collection[str] | None) -> set[str]:
        return _cell_names(rows if metrics is None else read_all(table, list_files, ["cell"], of))

    if metrics is not None:
        read = partial(read, metrics=metrics)
    while True:
        batches, packed_paths = batch_files(root, table), packed_files(root, table)
        try:
            layers = [
                (read(table, partial(_there, path), columns, cells), cells_of_batch(root, path.name))
                for path in batches
            ]
        except FileNotFoundError:
            continue
        own_files = partial(_own_files, root, table, cells)
        tables_of_cells = [_own(read, table, path, columns) for path in sorted(own_files())]
        own_rows = pa.concat_tables([read(table, list, columns, None), *tables_of_cells])
        layers.append((own_rows, named(own_rows, own_files, None)))
        for path in packed_paths:
            rows = read(table, partial(_there, path), columns, cells)
            layers.append((rows, named(rows, partial(_there, path), cells) if path != packed_paths[-1] else set()))
        if (batch_files(root, table), packed_files(root, table)) == (batches, packed_paths):
            break  # otherwise another process packed or wrote meanwhile
    hidden_cells: set[str] = set()
    current_tables = []
    for rows, cells_of_layer in layers:
        # Few cells of each batch, however many there are.
        replaced_cells = hidden_cells & cells_of_layer if cells_of_layer else hidden_cells
        if replaced_cells:
            rows = rows.filter(pc.invert(parts.is_in(rows["cell"], parts.texts_of(sorted(replaced_cells)))))
        current_tables.append(rows)
        hidden_cells |= cells_of_layer
    return pa.concat_tables(current_tables)


def _own(read: Read, table: str, path: Path, columns: Sequence[str]) -> pa.Table:
    """Return the rows of a cell's own file. Raises StoreError if they belong to another cell."""
    rows = read(table, partial(_there, path), columns, None)
    if other_cells := _cell_names(rows) - {path.stem}:
        raise StoreError(
            f"{path} has rows of cell {min(other_cells)}, but a cell's file must have the cell's name. Rename the "
            "file, or move it away if that cell has a file"
        )
    return rows


def _there(path: Path) -> list[Path]:
    return [path] if path.exists() else []


def _own_files(root: Path, table: str, cells: set[str] | None) -> list[Path]:
    if cells is None:
        return [path for path in table_files(root, table) if not is_packed(path) and not is_batch(path)]
    return [path for path in (own_file(root, table, cell) for cell in cells) if path.exists()]


def _cell_names(rows: pa.Table) -> set[str]:
    return set(rows["cell"].cast(pa.string()).unique().to_pylist())

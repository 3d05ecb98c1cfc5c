"""Which files of `cells`, `samples` and `metrics` count: rows of a cell stand in several while newer ones replace older ones.

Files written for many cells together come first, the newest before the others (`together.py`), then a cell's own, then packed
ones. What is in one hides all rows of its cells in those that come after it. So writing never touches what is packed, and
packing again folds everything into one layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store import parts, score_batches
from mmkv_bench.store.packing import is_packed
from mmkv_bench.store.rows import safe_name

Read = Callable[..., pa.Table]
"""Reads columns of all files that a function lists: `parts.load`, with what a store adds to it."""


def files(root: Path, table: str) -> list[Path]:
    folder = root / table
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.endswith(".parquet") and not name.startswith(".")]


def own_file(root: Path, table: str, cell: str) -> Path:
    return root / table / f"{safe_name('cell', cell)}.parquet"


def packed_files(root: Path, table: str) -> list[Path]:
    return sorted(path for path in files(root, table) if is_packed(path))


def load(
    root: Path,
    table: str,
    columns: Sequence[str],
    cells: set[str] | None,
    read: Read,
    metrics: Collection[str] | None = None,
) -> pa.Table:
    """The rows that count, `cell` among `columns`; of all cells and metrics unless given."""
    whole = read  # what hides others is told by all rows of a file, whatever is asked for

    def named(rows: pa.Table, list_files: Callable[[], list[Path]], of: Collection[str] | None) -> set[str]:
        return _names(rows if metrics is None else whole(table, list_files, ["cell"], of))

    if metrics is not None:
        read = partial(read, metrics=metrics)
    while True:
        newer, packed = score_batches.files(root, table), packed_files(root, table)
        try:
            found = [(_one(read, table, path, columns, cells), score_batches.held(root, path.name)) for path in newer]
        except FileNotFoundError:
            continue
        own_files = partial(_own_files, root, table, cells)
        own = pa.concat_tables(
            [read(table, list, columns, None), *(_own(read, table, path, columns) for path in sorted(own_files()))]
        )
        found.append((own, named(own, own_files, None)))
        for path in packed:
            rows = _one(read, table, path, columns, cells)
            found.append((rows, named(rows, partial(_there, path), cells) if path != packed[-1] else set()))
        if (score_batches.files(root, table), packed_files(root, table)) == (newer, packed):
            break  # otherwise somebody packed or wrote meanwhile
    hidden: set[str] = set()
    counting = []
    for rows, held in found:
        counting.append(rows.filter(pc.invert(_is_of(rows, hidden))) if hidden else rows)
        hidden |= held
    return pa.concat_tables(counting)


def among_others(root: Path, cells: Collection[str], read: Read) -> bool:
    """Whether a file of many cells holds scores of one of these: a file of its own would not replace them in one step."""
    if any(not score_batches.held(root, path.name).isdisjoint(cells) for path in score_batches.files(root, "samples")):
        return True
    held = (
        _one(read, table, path, ["cell"], None)
        for table in ("samples", "metrics")
        for path in packed_files(root, table)
    )
    return any(pc.any(_is_of(rows, cells), min_count=0).as_py() for rows in held)


def _one(read: Read, table: str, path: Path, columns: Sequence[str], cells: set[str] | None) -> pa.Table:
    """The rows of a file, none where it is gone."""
    return read(table, partial(_there, path), columns, cells)


def _own(read: Read, table: str, path: Path, columns: Sequence[str]) -> pa.Table:
    """The rows of a cell's own file. Raises StoreError where they are another cell's: the file's name was changed."""
    rows = _one(read, table, path, columns, None)
    if others := _names(rows) - {path.stem}:
        raise StoreError(
            f"{path} holds rows of cell {min(others)}: a cell's file has its name. Rename it, or move it away where that cell "
            "has a file"
        )
    return rows


def _there(path: Path) -> list[Path]:
    return [path] if path.exists() else []


def _own_files(root: Path, table: str, cells: set[str] | None) -> list[Path]:
    if cells is None:
        return [path for path in files(root, table) if not is_packed(path) and not score_batches.is_together(path)]
    return [path for path in (own_file(root, table, cell) for cell in cells) if path.exists()]


def _names(rows: pa.Table) -> set[str]:
    return set(rows["cell"].cast(pa.string()).unique().to_pylist())


def _is_of(rows: pa.Table, cells: Collection[str]) -> pa.ChunkedArray:
    return parts.is_in(rows["cell"], parts.texts_of(sorted(cells)))

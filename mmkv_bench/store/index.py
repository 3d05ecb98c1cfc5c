"""An index of the rows made of each file of a store's folder, so that only new files are read again.

It is a cache: `.index/` may be deleted at any time. An entry counts only for the same state of its file (see `file_state`). An
index that is damaged, or of another version, is made again without a message; where it cannot be written, all files are read each
time. It appears whole by a rename, so any number of processes may use it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from mmkv_bench.errors import StoreError
from mmkv_bench.file_state import State
from mmkv_bench.store import score_files
from mmkv_bench.store.files import write_bytes
from mmkv_bench.store.folder import StoreFolder
from mmkv_bench.store.parts import column_of, no_rows, numbers_of, of_columns
from mmkv_bench.store.sealed import Damaged, opened, sealed

FOLDER = ".index"
FILE = pa.field("file", pa.int32())
"""Column of the rows: the file, a place in `Indexed.files`."""
_META, _VERSION = b"mmkv_index", 1
WORTH = 64
"""Files of a folder below which nothing is kept, unless they are large."""
LARGE = 4 << 20
_RETRIES = 20


class Indexed:
    """Rows made of the files of a folder.

    Attributes:
        files: their names; rows: those made of them, with the column `file`.
    """

    def __init__(self, files: list[str], rows: pa.Table) -> None:
        self.files, self.rows = files, rows

    def of(self, names: Collection[str]) -> pa.Table:
        """The rows of some files, without the column `file`. Raises FileNotFoundError for one that is not known."""
        if unknown := sorted(set(names).difference(self.files)):
            raise FileNotFoundError(unknown[0])
        chosen = np.array([name in names for name in self.files], bool)
        return _where(self.rows, chosen[numbers_of(self.rows["file"])]).drop_columns(["file"])


def indexed(root: Path, table: str, schema: pa.Schema, make: Callable[[Path], pa.Table]) -> Indexed:
    """Rows of `schema` that `make` gives for each parquet file of a table's folder, as the files are now.

    Raises:
        StoreError: of `make`; files that keep vanishing.
    """
    index = root / FOLDER / f"{table}.parquet"
    kept, old = _opened(index, schema)
    for _ in range(_RETRIES):
        states = _states(root / table)
        lasting = {name for name, state in kept.items() if states.get(name) == state}
        try:
            return _completed(root, table, schema, make, (index, kept, old), (states, lasting))
        except FileNotFoundError:
            continue  # packed, or its scores replaced, since it was listed
    raise _vanishing(root / table)


def remembered(store: StoreFolder, table: str, columns: Sequence[str]) -> pa.Table:
    """Some columns of the rows of `cells`, `samples` or `metrics` that count, texts coded: see `score_files.current_rows`."""

    def read(
        table: str, list_files: Callable[[], list[Path]], columns: Sequence[str], cells: Collection[str] | None
    ) -> pa.Table:
        return current.of({path.name for path in list_files()}).select(columns)

    schema = of_columns(table, columns, coded=True)
    for _ in range(_RETRIES):
        current = indexed(store.root, table, schema, lambda path: store.read_file(table, path, columns, coded=True))
        try:
            return score_files.current_rows(store.root, table, columns, None, read)
        except FileNotFoundError:
            continue  # written since the files were listed
    raise _vanishing(store.root / table)


def _vanishing(folder: Path) -> StoreError:
    return StoreError(f"{folder}: files keep changing while they are read; is another program removing them?")


def _completed(
    root: Path,
    table: str,
    schema: pa.Schema,
    make: Callable[[Path], pa.Table],
    before: tuple[Path, dict[str, State], pa.Table],
    now: tuple[dict[str, State], set[str]],
) -> Indexed:
    index, kept, old = before
    states, lasting = now
    fresh = sorted(states.keys() - lasting)
    if not fresh and len(lasting) == len(kept):
        return Indexed(list(kept), old)
    stays = np.array([name in lasting for name in kept], bool)
    place = np.cumsum(stays) - 1
    numbers = numbers_of(old["file"])
    tables = [_numbered(_where(old, stays[numbers]), place[numbers[stays[numbers]]])] if len(numbers) else []
    files = [name for name in kept if name in lasting]
    for name in fresh:
        made = make(root / table / name)
        tables.append(_numbered(made, np.full(made.num_rows, len(files))))
        files.append(name)
    rows = pa.concat_tables([no_rows(_schema(schema)), *tables]).combine_chunks()
    _keep(root, index, {name: states[name] for name in files}, rows)
    return Indexed(files, rows)


def _keep(root: Path, index: Path, states: Mapping[str, State], rows: pa.Table) -> None:
    """Write the index of those files whose further changes would show."""
    if len(states) < WORTH and sum(state.size for state in states.values()) < LARGE:
        return
    # A file system that is mounted read-only may show times that tell nothing (see file_state).
    with suppress(OSError):
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return
        settled = {name: state for name, state in states.items() if state.settled}
        if len(settled) < len(states):
            lasts = np.array([name in settled for name in states], bool)
            numbers = numbers_of(rows["file"])
            rows = _numbered(
                _where(rows, lasts[numbers]).drop_columns(["file"]), (np.cumsum(lasts) - 1)[numbers[lasts[numbers]]]
            )
        metadata = json.dumps({"version": _VERSION, "files": settled}).encode()
        write_bytes(index, sealed(rows.replace_schema_metadata({_META: metadata}), compression="zstd"))


def _opened(index: Path, schema: pa.Schema) -> tuple[dict[str, State], pa.Table]:
    """Read an index; empty where it cannot be used."""
    empty = no_rows(_schema(schema))
    try:
        with opened(index) as (file, _):
            rows = file.read()
        metadata = json.loads(rows.schema.metadata[_META])
        if metadata["version"] != _VERSION or not rows.schema.equals(_schema(schema)):
            return {}, empty
        return {name: State(*state) for name, state in metadata["files"].items()}, rows.replace_schema_metadata(None)
    except (OSError, Damaged, pa.ArrowException, ValueError, KeyError, TypeError, StoreError):
        return {}, empty


def _states(folder: Path) -> dict[str, State]:
    """Parquet files of a folder that readers count, by name."""
    states = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".parquet") and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    states[entry.name] = State.of(os.stat(entry.path))
    return states


def _schema(schema: pa.Schema) -> pa.Schema:
    return schema.append(FILE)


def _numbered(rows: pa.Table, file: np.ndarray) -> pa.Table:
    if "file" in rows.schema.names:
        rows = rows.drop_columns(["file"])
    return rows.append_column(FILE, column_of(file.astype(np.int32)))


def _where(rows: pa.Table, chosen: np.ndarray) -> pa.Table:
    return rows if chosen.all() else rows.take(column_of(np.flatnonzero(chosen)))

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

import pyarrow as pa

from mmkv_bench.errors import StoreError
from mmkv_bench.file_state import State
from mmkv_bench.store import score_files
from mmkv_bench.store.files import write_bytes
from mmkv_bench.store.folder import RETRIES, StoreFolder
from mmkv_bench.store.parts import no_rows, of_columns
from mmkv_bench.store.sealed import Damaged, opened, sealed

FOLDER = ".index"
_META, _VERSION = b"mmkv_index", 2
WORTH = 64
"""Files of a folder below which nothing is kept, unless they are large."""
LARGE = 4 << 20


class Indexed:
    """Rows made of the files of a folder: `counts` has the name of each file and how many of `rows` come from it, in order."""

    def __init__(self, counts: Mapping[str, int], rows: pa.Table) -> None:
        self.counts, self.rows = counts, rows
        self._starts, start = {}, 0
        for name, count in counts.items():
            self._starts[name] = start
            start += count

    def of(self, names: Collection[str]) -> pa.Table:
        """The rows of some files, in the order of their names. Raises FileNotFoundError for one that is not known."""
        try:
            slices = [self.rows.slice(self._starts[name], self.counts[name]) for name in sorted(names)]
        except KeyError as unknown:
            raise FileNotFoundError(unknown.args[0]) from None
        return pa.concat_tables([no_rows(self.rows.schema), *slices])


def indexed(root: Path, table: str, schema: pa.Schema, make: Callable[[Path], pa.Table]) -> Indexed:
    """Rows of `schema` that `make` gives for each parquet file of a table's folder, as the files are now.

    Raises:
        StoreError: of `make`; files that keep vanishing.
    """
    index = root / FOLDER / f"{table}.parquet"
    known, old = _opened(index, schema)
    for _ in range(RETRIES):
        states = {}
        for path in score_files.table_files(root, table):
            with suppress(FileNotFoundError):
                states[path.name] = State.of(os.stat(path))
        if states == known:
            return old
        lasting = {name for name, state in known.items() if states.get(name) == state}
        try:
            made = {name: make(root / table / name) for name in sorted(states.keys() - lasting)}
        except FileNotFoundError:
            continue  # packed, or its scores replaced, since it was listed
        counts = {name: old.counts[name] for name in sorted(lasting)} | {name: len(made[name]) for name in made}
        current = Indexed(counts, pa.concat_tables([old.of(lasting), *made.values()]).combine_chunks())
        _keep(root, index, states, current)
        return current
    raise _vanishing(root / table)


def remembered(store: StoreFolder, table: str, columns: Sequence[str]) -> pa.Table:
    """Some columns of the rows of `cells`, `samples` or `metrics` that count, texts coded: see `score_files.current_rows`."""

    def read(
        table: str, list_files: Callable[[], list[Path]], columns: Sequence[str], cells: Collection[str] | None
    ) -> pa.Table:
        return current.of({path.name for path in list_files()}).select(columns)

    schema = of_columns(table, columns, coded=True)
    for _ in range(RETRIES):
        current = indexed(store.root, table, schema, lambda path: store.read_file(table, path, columns, coded=True))
        try:
            return score_files.current_rows(store.root, table, columns, None, read)
        except FileNotFoundError:
            continue  # written since the files were listed
    raise _vanishing(store.root / table)


def _vanishing(folder: Path) -> StoreError:
    return StoreError(f"{folder}: files keep changing while they are read; is another program removing them?")


def _keep(root: Path, index: Path, states: Mapping[str, State], current: Indexed) -> None:
    """Write the index of those files whose further changes would show."""
    if len(states) < WORTH and sum(state.size for state in states.values()) < LARGE:
        return
    # A file system that is mounted read-only may show times that tell nothing (see file_state).
    with suppress(OSError):
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return
        settled = {name: [*states[name], current.counts[name]] for name in sorted(states) if states[name].settled}
        metadata = {_META: json.dumps({"version": _VERSION, "files": settled}).encode()}
        write_bytes(index, sealed(current.of(settled).replace_schema_metadata(metadata), compression="zstd"))


def _opened(index: Path, schema: pa.Schema) -> tuple[dict[str, State], Indexed]:
    """Read an index; empty where it cannot be used."""
    try:
        with opened(index) as (file, _):
            rows = file.read()
        metadata = json.loads(rows.schema.metadata[_META])
        if metadata["version"] == _VERSION and rows.schema.equals(schema):
            states = {name: State(*state) for name, (*state, _) in metadata["files"].items()}
            counts = {name: entry[-1] for name, entry in metadata["files"].items()}
            return states, Indexed(counts, rows.replace_schema_metadata(None))
    except (OSError, Damaged, pa.ArrowException, ValueError, KeyError, TypeError):
        pass
    return {}, Indexed({}, no_rows(schema))

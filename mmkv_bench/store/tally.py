"""Counts of a store's answers per cell and status, with samples and times, without reading files twice.

A cell is one method at one budget on one dataset. For each parquet file, the answers per cell are counted with a digest
of their samples. The counts of several files are added if the files share no sample of a cell. Otherwise the newest
rows of that cell are counted.

A 128-bit digest of a cell's answers tells whether stored scores belong to these answers. It is the sum over answers of
the digest of the sample's id times the digest of status and text. So answers may be added in any order, but swapping
two answers changes the digest.

The counts of each file are kept in an index, `.index/`. This is a cache, which may be deleted. An entry counts only
while its file's state is unchanged (see `file_state`). A damaged or outdated index is made again, and without write
access all files are read each time. The index is replaced by a rename, so any number of processes may use it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.file_state import State
from mmkv_bench.store import journal, parts, score_files
from mmkv_bench.store.files import write_bytes
from mmkv_bench.store.folder import RETRIES, StoreFolder
from mmkv_bench.store.parts import codes_of, column_of, dictionary_encoded, numbers_of, texts_of
from mmkv_bench.store.rows import to_table
from mmkv_bench.store.store import Store

_COLUMNS = ("cell", "sample_id", "status", "error", "committed_at", "answer", "cluster")
_ANSWER_COLUMNS = ("sample_id", "status", "answer")
_MASK_64_BITS = (1 << 64) - 1
_MESSAGE_LENGTH = 100
"""Maximum number of characters of a failure's message."""
COUNTS = pa.schema(
    [
        ("cell", pa.string()),
        ("samples", pa.string()),  # digest of the cell's samples in this file
        ("status", pa.string()),
        ("error", pa.string()),
        ("n", pa.int64()),
        ("first", pa.int64()),  # commit times, microseconds
        ("last", pa.int64()),
        ("low", pa.int64()),  # sums of the answers' digests, modulo 2^64
        ("high", pa.int64()),
        ("clusters", pa.int64()),  # sum of the digests of samples with their clusters, modulo 2^64
    ]
)
_SETS_FIELD = pa.field("ids", pa.list_(pa.string()))  # the samples of a digest, in the digest's first row; else empty


@dataclass(frozen=True)
class Tally:
    """Counts of a store's answers, per cell, status and error message.

    Attributes:
        counts: table with the columns of `COUNTS`. Each sample of a cell is counted once.
        sets: digest in the column `samples` of `counts`, to the sample ids.
        running: cells with answers in the journal of a living writer.
        writers: number of living writers.
    """

    counts: pa.Table
    sets: dict[str, list[str]]
    running: set[str]
    writers: int

    def _sums(self, *columns: str) -> tuple[list[str], list[np.ndarray]]:
        """Return the cells, and per-cell sums of each of these columns of `counts`."""
        cells = dictionary_encoded(self.counts["cell"])
        names, codes = cells.dictionary.to_pylist(), codes_of(cells)
        return names, [_sums(numbers_of(self.counts[column]), codes, len(names)) for column in columns]

    @property
    def digests(self) -> dict[str, tuple[int, str]]:
        """Map each cell to the number of its answers and their digest (see `digests_of_cells`)."""
        cell_names, (n_answers, low, high) = self._sums("n", "low", "high")
        return {name: (int(n_answers[at]), digest_text(low[at], high[at])) for at, name in enumerate(cell_names)}

    @property
    def clusters(self) -> dict[str, int]:
        """Map each cell to a digest of its samples and their clusters: the sum of `clusters_of`, modulo 2^64."""
        cell_names, (cluster_digests,) = self._sums("clusters")
        return dict(zip(cell_names, cluster_digests.view(np.uint64).tolist(), strict=True))


def clusters_of(samples: pa.Array, clusters: pa.Array) -> np.ndarray:
    """Return a digest of each row's (sample, cluster), uint64 [rows]. The columns may be dictionary-encoded.

    samples, clusters: sample id and cluster (page, image, document or video of the sample) of each row.
    """
    coded_samples, coded_clusters = dictionary_encoded(samples), dictionary_encoded(clusters)
    number_of_clusters = len(coded_clusters.dictionary) + 1  # one more: no cluster
    pair_codes, pair_of_row = np.unique(
        codes_of(coded_samples) * number_of_clusters + codes_of(coded_clusters) % number_of_clusters,
        return_inverse=True,
    )
    sample_names = coded_samples.dictionary.take(column_of(pair_codes // number_of_clusters)).to_pylist()
    cluster_names = [*coded_clusters.dictionary.to_pylist(), ""]
    pair_texts = [
        f"{name}\0{cluster_names[page]}"
        for name, page in zip(sample_names, (pair_codes % number_of_clusters).tolist(), strict=True)
    ]
    return _digests(pair_texts)[:, 0][pair_of_row.reshape(-1)] if pair_texts else np.zeros(0, np.uint64)


def tally(store: Store) -> Tally:
    """Count the answers of a store. Raises StoreError for damaged files."""
    store.check_version()
    # Journals first: a journal published between the two reads is then left out, because its part has the same name.
    pending_rows, living_journals = {}, set()
    for path in store.journals():
        if journal.in_use(path):
            living_journals.add(path.stem)
        pending_rows[path.stem] = to_table("responses", store.journal_rows(path), _COLUMNS)

    def make(path: Path) -> pa.Table:
        return count_answers(
            parts.newest(parts.read_file(path, parts.schema_of_columns("responses", _COLUMNS, coded=True)))
        )

    index = index_rows(store.root, "responses", COUNTS.append(_SETS_FIELD), make)
    published_stems = {Path(name).stem for name in index.counts}
    running_cells: set[str] = set()
    tables, file_of_row = [index.rows], [np.repeat(np.arange(len(index.counts)), list(index.counts.values()))]
    for number, (name, rows) in enumerate(pending_rows.items(), len(index.counts)):
        if name in living_journals:
            running_cells.update(rows["cell"].unique().to_pylist())
        if name not in published_stems and rows.num_rows:
            tables.append(count_answers(parts.newest(rows)))
            file_of_row.append(np.full(tables[-1].num_rows, number))
    answer_counts, ids_by_set = _apart(pa.concat_tables(tables).combine_chunks())
    cells_answered_twice = _answered_twice(answer_counts, np.concatenate(file_of_row), ids_by_set)
    if cells_answered_twice:
        recounted, further_sets = _apart(count_answers(store.responses(cells_answered_twice, _COLUMNS, coded=True)))
        is_other_cell = parts.places(answer_counts["cell"], texts_of(sorted(cells_answered_twice))) < 0
        answer_counts = pa.concat_tables([answer_counts.take(column_of(np.flatnonzero(is_other_cell))), recounted])
        ids_by_set |= further_sets
    return Tally(answer_counts, ids_by_set, running_cells, len(living_journals))


def _apart(rows: pa.Table) -> tuple[pa.Table, dict[str, list[str]]]:
    """Split the table of `count_answers` into the columns of `COUNTS`, and digest of a set -> its sample ids."""
    rows_with_ids = np.flatnonzero(numbers_of(pc.list_value_length(rows["ids"])))
    sets_with_ids = rows.select(["samples", "ids"]).take(column_of(rows_with_ids))
    return rows.drop_columns(["ids"]), dict(zip(*(column.to_pylist() for column in sets_with_ids.columns), strict=True))


def count_answers(rows: pa.Table) -> pa.Table:
    """Count answers per cell, status and error message. Return a table with the columns `COUNTS` and `_SETS_FIELD`.

    rows: columns `_COLUMNS`, one row per cell and sample, sorted by both.
    """
    if not rows.num_rows:
        return parts.no_rows(COUNTS.append(_SETS_FIELD))
    cells, samples, statuses, errors = (dictionary_encoded(rows[name]) for name in _COLUMNS[:4])
    commit_times = numbers_of(rows["committed_at"].cast(pa.int64()))
    cell_of_row, sample_of_row = numbers_of(cells.indices), numbers_of(samples.indices)
    sample_names = samples.dictionary.to_pylist()
    cell_starts = np.append(0, np.flatnonzero(np.diff(cell_of_row)) + 1)
    sample_digests = _digests(sample_names)
    with np.errstate(over="ignore"):
        set_digests = np.add.reduceat(sample_digests[sample_of_row], cell_starts, axis=0)  # in any order of the samples
    distinct_sets, first_cell_of_set, set_of_cell = np.unique(
        set_digests, axis=0, return_index=True, return_inverse=True
    )
    samples_per_cell = np.diff(np.append(cell_starts, len(cell_of_row)))
    cell_number_of_row = np.repeat(np.arange(len(cell_starts)), samples_per_cell)
    error_lines, error_of_row = _heads(errors)
    status_of_row = numbers_of(statuses.indices)
    key = (cell_number_of_row * len(statuses.dictionary) + status_of_row) * (len(error_lines) + 1) + error_of_row
    keys, first_row_of_group, group_of_row, n_answers = np.unique(
        key, return_index=True, return_inverse=True, return_counts=True
    )
    summed_columns = (*answer_digests(rows).T, clusters_of(rows["sample_id"], rows["cluster"]))
    low, high, clusters = (_sums(lane, group_of_row, len(keys)) for lane in summed_columns)
    first_commit, last_commit = np.full(len(keys), np.iinfo(np.int64).max), np.full(len(keys), np.iinfo(np.int64).min)
    np.minimum.at(first_commit, group_of_row, commit_times)
    np.maximum.at(last_commit, group_of_row, commit_times)
    samples_of = set_of_cell.reshape(-1)[cell_number_of_row[first_row_of_group]]
    set_names = [row.tobytes().hex() for row in distinct_sets]
    texts, ids_per_row = [], np.zeros(len(keys) + 1, np.int32)
    for row in sorted(np.unique(samples_of, return_index=True)[1]):  # the first row of each set
        at = first_cell_of_set[samples_of[row]]
        texts += [
            sample_names[code] for code in sample_of_row[cell_starts[at] : cell_starts[at] + samples_per_cell[at]]
        ]
        ids_per_row[row + 1] = samples_per_cell[at]
    has_no_error = pc.equal(column_of(error_of_row[first_row_of_group]), column_of(np.array([len(error_lines)]))[0])
    messages = texts_of([*error_lines, ""]).take(column_of(error_of_row[first_row_of_group]))
    return pa.Table.from_arrays(
        [
            cells.dictionary.take(column_of(cell_of_row[first_row_of_group])),
            texts_of(set_names).take(column_of(samples_of)),
            statuses.dictionary.take(column_of(status_of_row[first_row_of_group])),
            pc.if_else(has_no_error, pa.nulls(1, pa.string())[0], messages),
            *map(column_of, (n_answers, first_commit, last_commit, low, high, clusters)),
            pa.ListArray.from_arrays(column_of(np.cumsum(ids_per_row, dtype=np.int32)), texts_of(texts)),
        ],
        schema=COUNTS.append(_SETS_FIELD),
    )


def _sums(values: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """Return the sums of `values` by group number, modulo 2^64, int64 [groups]."""
    sums = np.zeros(groups, np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(sums, group, values.view(np.uint64))
    return sums.view(np.int64)


def _digests(names: list[str]) -> np.ndarray:
    """Return a digest of each name, uint64 [names, 2]. Different sets of names practically never have the same sum."""
    return np.frombuffer(b"".join(hashlib.sha256(name.encode()).digest()[:16] for name in names), "<u8").reshape(-1, 2)


def _heads(errors: pa.DictionaryArray) -> tuple[list[str], np.ndarray]:
    """Return the distinct first lines of messages (shortened), and each row's index; the number of lines if null."""
    first_lines = [(text or "").strip().partition("\n")[0] for text in errors.dictionary.to_pylist()]
    first_lines = [text if len(text) <= _MESSAGE_LENGTH else text[:_MESSAGE_LENGTH] + "..." for text in first_lines]
    distinct_lines = list(dict.fromkeys(first_lines))
    place_of_line = {text: place for place, text in enumerate(distinct_lines)}
    line_of_text = np.array([place_of_line[text] for text in first_lines] + [len(distinct_lines)], np.int64)
    return distinct_lines, line_of_text[codes_of(errors)]


def _answered_twice(counts: pa.Table, files: np.ndarray, sets: dict[str, list[str]]) -> set[str]:
    """Return the cells for which two files have an answer to the same sample.

    files: file number of each row of `counts`.
    sets: digest of a set to its sample ids.
    """
    if not counts.num_rows:
        return set()
    cells, digests = dictionary_encoded(counts["cell"]), dictionary_encoded(counts["samples"])
    cell_names, ids_of_set = cells.dictionary.to_pylist(), [set(sets[name]) for name in digests.dictionary.to_pylist()]
    cell, samples = codes_of(cells), codes_of(digests)
    _, first_rows = np.unique(cell * (files.max() + 1) + files, return_index=True)  # by cell, then file
    cell_cuts = np.flatnonzero(np.diff(cell[first_rows])) + 1
    cells_answered_twice, is_disjoint_by_sets = set(), {}
    for of_cell, places in zip(
        cell[first_rows][np.append(0, cell_cuts)], np.split(samples[first_rows], cell_cuts), strict=True
    ):
        key = places.tobytes()  # most cells have the same samples in the same files
        if key not in is_disjoint_by_sets:
            is_disjoint_by_sets[key] = len(set().union(*(ids_of_set[at] for at in places))) == sum(
                len(ids_of_set[at]) for at in places
            )
        if not is_disjoint_by_sets[key]:
            cells_answered_twice.add(cell_names[of_cell])
    return cells_answered_twice


def answer_digests(rows: pa.Table) -> np.ndarray:
    """Return a digest of each answer, uint64 [rows, 2]. The sum over a cell's answers is the cell's digest.

    rows: columns `_ANSWER_COLUMNS`, dictionary-encoded or not.
    """
    sample, status, answer = (dictionary_encoded(rows[name]) for name in _ANSWER_COLUMNS)
    sample_digests = _odd_digests(sample.dictionary.to_pylist())[codes_of(sample)]
    answer_text_digests = _odd_digests([f"={text}" for text in answer.dictionary.to_pylist()] + ["-"])[codes_of(answer)]
    status_digests = _odd_digests(status.dictionary.to_pylist())[codes_of(status)]
    with np.errstate(over="ignore"):  # odd factors, so no product loses information about a factor
        return sample_digests * (answer_text_digests * status_digests)


def digest_text(low: Any, high: Any) -> str:
    return f"{int(high) & _MASK_64_BITS:016x}{int(low) & _MASK_64_BITS:016x}"


def digests_of_cells(rows: pa.Table) -> dict[str, str]:
    """Map each cell to a digest of its answers (32 hex digits). rows: columns `cell` and `_ANSWER_COLUMNS`."""
    if not rows.num_rows:
        return {}
    cells = dictionary_encoded(rows["cell"])
    cell_names, cell_codes = cells.dictionary.to_pylist(), codes_of(cells)
    low, high = (_sums(lane, cell_codes, len(cell_names)) for lane in answer_digests(rows).T)
    return {cell_names[code]: digest_text(low[code], high[code]) for code in np.unique(cell_codes)}


def _odd_digests(texts: Sequence[str | None]) -> np.ndarray:
    return _digests([text or "" for text in texts]) | np.uint64(1)


# The index

INDEX_FOLDER = ".index"
_METADATA_KEY, _VERSION = b"mmkv_index", 2
MIN_FILES = 64
"""Folders with fewer files get no index, unless the files are large."""
MIN_BYTES = 4 << 20


class Indexed:
    """Rows computed from the files of a folder. counts: file name to its number of rows, in the order of `rows`."""

    def __init__(self, counts: Mapping[str, int], rows: pa.Table) -> None:
        self.counts, self.rows = counts, rows
        self._starts, file_start = {}, 0
        for name, count in counts.items():
            self._starts[name] = file_start
            file_start += count

    def of(self, names: Collection[str]) -> pa.Table:
        """Return the rows of the files `names`, sorted by file name. Raises FileNotFoundError for an unknown file."""
        try:
            slices = [self.rows.slice(self._starts[name], self.counts[name]) for name in sorted(names)]
        except KeyError as unknown:
            raise FileNotFoundError(unknown.args[0]) from None
        return pa.concat_tables([parts.no_rows(self.rows.schema), *slices])


def index_rows(root: Path, table: str, schema: pa.Schema, make: Callable[[Path], pa.Table]) -> Indexed:
    """Apply `make` to each parquet file of a table, and return the resulting rows, in `schema`.

    Results are cached in an index on disk, so unchanged files are not read.

    Raises StoreError: raised by `make`, or files keep vanishing.
    """
    index = root / INDEX_FOLDER / f"{table}.parquet"
    known_states, old_index = _opened(index, schema)
    for _ in range(RETRIES):
        states = {}
        for path in score_files.table_files(root, table):
            with suppress(FileNotFoundError):
                states[path.name] = State.of(os.stat(path))
        if states == known_states:
            return old_index
        unchanged_files = {name for name, state in known_states.items() if states.get(name) == state}
        try:
            rows_by_new_file = {name: make(root / table / name) for name in sorted(states.keys() - unchanged_files)}
        except FileNotFoundError:
            continue  # packed, or its scores replaced, since it was listed
        rows_by_file = {name: old_index.counts[name] for name in sorted(unchanged_files)} | {
            name: len(rows_by_new_file[name]) for name in rows_by_new_file
        }
        current = Indexed(
            rows_by_file, pa.concat_tables([old_index.of(unchanged_files), *rows_by_new_file.values()]).combine_chunks()
        )
        _keep(root, index, states, current)
        return current
    raise _vanishing(root / table)


def cached_rows(store: StoreFolder, table: str, columns: Sequence[str]) -> pa.Table:
    """Return some columns of the current rows of `cells`, `samples` or `metrics` (see `score_files.current_rows`).

    Results are cached in an index on disk, so unchanged files are not read. Text columns are dictionary-encoded.
    """

    def read(
        table: str, list_files: Callable[[], list[Path]], columns: Sequence[str], cells: Collection[str] | None
    ) -> pa.Table:
        return current.of({path.name for path in list_files()}).select(columns)

    store.check_version()
    schema = parts.schema_of_columns(table, columns, coded=True)
    for _ in range(RETRIES):
        current = index_rows(store.root, table, schema, lambda path: parts.read_file(path, schema))
        try:
            return score_files.current_rows(store.root, table, columns, None, read)
        except FileNotFoundError:
            continue  # written since the files were listed
    raise _vanishing(store.root / table)


def _vanishing(folder: Path) -> StoreError:
    return StoreError(
        f"{folder}: files keep changing while they are read: is another program removing them? Stop "
        "that program, then read again"
    )


def _keep(root: Path, index: Path, states: Mapping[str, State], current: Indexed) -> None:
    """Write the index, unless the store is small. Files that changed just now are left out (see `State.settled`)."""
    if len(states) < MIN_FILES and sum(state.size for state in states.values()) < MIN_BYTES:
        return
    # On a read-only file system times may say nothing about changes (see file_state).
    with suppress(OSError):
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            return
        settled_files = {name: [*states[name], current.counts[name]] for name in sorted(states) if states[name].settled}
        metadata = {_METADATA_KEY: json.dumps({"version": _VERSION, "files": settled_files}).encode()}
        write_bytes(
            index, parts.parquet_bytes(current.of(settled_files).replace_schema_metadata(metadata), compression="zstd")
        )


def _opened(index: Path, schema: pa.Schema) -> tuple[dict[str, State], Indexed]:
    """Read an index. Return each file's state, and the rows computed from the files; both empty if unusable."""
    try:
        with parts.open_checked(index) as file:
            rows = file.read()
        metadata = json.loads(rows.schema.metadata[_METADATA_KEY])
        if metadata["version"] == _VERSION and rows.schema.equals(schema):
            state_by_file = {name: State(*state) for name, (*state, _) in metadata["files"].items()}
            rows_by_file = {name: entry[-1] for name, entry in metadata["files"].items()}
            return state_by_file, Indexed(rows_by_file, rows.replace_schema_metadata(None))
    except (OSError, parts.Damaged, pa.ArrowException, ValueError, KeyError, TypeError):
        pass
    return {}, Indexed({}, parts.no_rows(schema))

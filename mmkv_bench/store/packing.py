"""Packed files for publishing: few, of limited size, with cells of similar answers as neighbours. And slim rows for
git.

A cell is one method at one budget on one dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.store.parts import codes_of, open_checked, parquet_bytes, readable


def rows_per_cell(path: Path) -> dict[str, int]:
    """Map each cell in a parquet file to its number of rows. Raises FileNotFoundError, StoreError."""
    rows_by_cell: dict[str, int] = {}
    with readable(path), open_checked(path, ["cell"]) as file:
        for group in range(file.num_row_groups):
            for codes in file.read_row_group(group, ["cell"])["cell"].chunks:
                rows_in_chunk = np.bincount(codes_of(codes), minlength=len(codes.dictionary)).tolist()
                for name, count in zip(codes.dictionary.to_pylist(), rows_in_chunk, strict=True):
                    rows_by_cell[name] = rows_by_cell.get(name, 0) + count
    return {name: count for name, count in rows_by_cell.items() if count}


Name = TypeVar("Name", str, int)


def blocks(names: Iterable[Name], counts: Mapping[Name, int], at_once: int) -> Iterator[list[Name]]:
    """Split `names`, in order, into lists with at most `at_once` rows. A name with more rows gets its own list.

    counts: number of rows of each name.
    """
    block: list[Name] = []
    rows_in_block = 0
    for name in names:
        rows = counts.get(name, 0)
        if block and rows_in_block + rows > at_once:
            yield block
            block, rows_in_block = [], 0
        block.append(name)
        rows_in_block += rows
    if block:
        yield block


ONE_IN, MIN_ROWS_PER_CELL = 10, 3  # digests of one row in ten, and of three per cell
TIMES = ("encode_s", "vision_s", "prefill_s", "compress_s", "decode_s", "ttft_s", "tpot_s")
OF_GROUPS = (*TIMES, "peak_device_bytes", "peak_resident_bytes")
ALWAYS_DROPPED = ("forced_kl", "forced_agree", "reference_nll", "fork_group")


def slim(rows: pa.Table) -> pa.Table:
    """Return rows of `responses` without the values of `schema.SLIM`. Running the cells again restores them.

    rows: all columns, one row per cell and sample.
    """
    everywhere = pa.array(np.ones(rows.num_rows, bool))
    cells, samples = (rows[name].combine_chunks().dictionary_encode() for name in ("cell", "sample_id"))
    mask_by_column = dict.fromkeys(OF_GROUPS, pc.equal(rows["measured"], "group")) | dict.fromkeys(
        ALWAYS_DROPPED, everywhere
    )
    for name, where in (mask_by_column | {"kept_digest": pa.array(~rows_with_digest(cells, samples))}).items():
        rows = _with(rows, name, pc.if_else(where, pa.scalar(None, rows.schema.field(name).type), rows[name]))
    newest_commit_of_cell = np.full(len(cells.dictionary), np.iinfo(np.int64).min)
    cell_of_row = cells.indices.to_numpy()
    np.maximum.at(newest_commit_of_cell, cell_of_row, rows["committed_at"].cast(pa.int64()).to_numpy())
    rows = _with(rows, "committed_at", pa.array(newest_commit_of_cell[cell_of_row]))
    return _with(rows, "slim", everywhere)


def rows_with_digest(cells: pa.DictionaryArray, samples: pa.DictionaryArray) -> np.ndarray:
    """Choose the rows that keep their `kept_digest` in slim form, by cell and sample only. Return a mask, bool [n].

    About one in `ONE_IN` rows is chosen, and at least `MIN_ROWS_PER_CELL` per cell.

    cells, samples: cell hash and sample id of each of the n rows.
    """
    cell_of_row = cells.indices.to_numpy()
    with np.errstate(over="ignore"):
        row_hashes = _hashes(cells)[cell_of_row] * np.uint64(0x9E3779B97F4A7C15)
        row_hashes += _hashes(samples)[samples.indices.to_numpy()]
        row_hashes = (row_hashes ^ (row_hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        row_hashes = (row_hashes ^ (row_hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        row_hashes ^= row_hashes >> np.uint64(31)
    is_chosen = row_hashes < np.uint64(2**64 // ONE_IN)
    row_order = np.lexsort((row_hashes, cell_of_row))
    cell_starts = np.flatnonzero(np.append(True, np.diff(cell_of_row[row_order]) != 0)) if len(row_order) else row_order
    rank_in_cell = np.arange(len(row_order)) - np.repeat(cell_starts, np.diff(np.append(cell_starts, len(row_order))))
    is_chosen[row_order[rank_in_cell < MIN_ROWS_PER_CELL]] = True
    return is_chosen


def _hashes(names: pa.DictionaryArray) -> np.ndarray:
    """Return a hash of each name in the dictionary of `names`, uint64 [names]."""
    first_bytes = [hashlib.sha256(name.encode()).digest()[:8] for name in names.dictionary.to_pylist()]
    return np.frombuffer(b"".join(first_bytes), dtype="<u8")


def _with(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    field = rows.schema.field(name)
    return rows.set_column(rows.schema.get_field_index(name), field, values.cast(field.type))


LARGEST_FILE = 9_500_000
"""Bytes of a packed file, below the limit of 10 MB of a repository of results (`scripts/weight.py`)."""
ROW_GROUP = 1 << 19
DENSEST_LEVEL = 19
"""Level of zstd for rows in git. For a million answers, it takes minutes to save a sixteenth of the size at
`QUICK_LEVEL`."""
QUICK_LEVEL = 9
ALIKE = (  # columns of `cells` that define the order of rows in packed files
    *("model", "dataset", "dataset_fingerprint", "base", "method", "reading", "protocol", "budget_kind"),
    *("budget_entries", "budget_fraction", "seed", "parameters", "cell"),
)
_UNREPEATED_COLUMNS = ("answer", "config", *TIMES)  # values rarely repeat, so a dictionary would make the file longer


def is_packed(path: Path) -> bool:
    return path.name == "packed.parquet" or path.name.startswith("packed-")


def similarity_order(cells: pa.Table) -> list[str]:
    """Return cell hashes, sorted by `ALIKE`, so that neighbours agree in dataset, method and budget."""
    cell_columns = cells.select(ALIKE).combine_chunks()
    return cell_columns.sort_by([(name, "ascending") for name in ALIKE])["cell"].to_pylist()


def in_cell_order(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Return the cell hashes `names` in the order of `order`; hashes missing there come last."""
    known_names = set(names)
    ordered_names = [name for name in order if name in known_names]
    return ordered_names + sorted(known_names.difference(ordered_names))


def sort_by_cell(rows: pa.Table, order: Sequence[str]) -> pa.Table:
    """Return rows sorted by cell, in the order of `order`; other cells come last. Rows of one cell keep their order."""
    place_of_row = pc.index_in(rows["cell"], value_set=pa.array(order, pa.string())).fill_null(len(order)).to_numpy()
    return rows.take(np.argsort(place_of_row, kind="stable"))


def packed(
    rows: pa.Table, largest: int = LARGEST_FILE, together: str = "cell", level: int = DENSEST_LEVEL
) -> list[bytes]:
    """Return `rows` as the contents of parquet files of at most `largest` bytes each.

    rows: sorted so that rows of one cell are adjacent.
    together: column whose equal values stay in one file, which may then exceed `largest`.
    level: compression level of zstd.
    """
    file_bytes = parquet_bytes(
        rows,
        row_group_size=ROW_GROUP,
        compression="zstd",
        compression_level=level,
        **_encodings(rows.schema),
        dictionary_pagesize_limit=64 << 20,
        data_page_size=64 << 20,  # one page per column and row group: zstd sees all of it
        max_rows_per_page=ROW_GROUP,
    )
    group_of_row = rows[together].combine_chunks().dictionary_encode().indices.to_numpy()
    group_ends = np.flatnonzero(np.diff(group_of_row)) + 1
    if len(file_bytes) <= largest or not len(group_ends):
        return [file_bytes]
    number_of_files = -(-len(file_bytes) * 21 // (largest * 20))  # 5 % to spare
    ideal_cuts = np.arange(1, number_of_files) * rows.num_rows // number_of_files
    row_cuts = np.unique(group_ends[np.minimum(np.searchsorted(group_ends, ideal_cuts), len(group_ends) - 1)])
    return [
        file
        for start, end in pairwise([0, *row_cuts.tolist(), rows.num_rows])
        for file in packed(rows.slice(start, end - start), largest, together, level)
    ]


def _encodings(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the keyword arguments for pyarrow that set the encoding of each column.

    BYTE_STREAM_SPLIT suits integers and times, whose upper bytes hardly differ, and floats that rarely repeat. Other
    repeated values get dictionaries.
    """
    dictionary_columns, byte_split_columns = [], []
    for field in schema:
        path, column_type = field.name, field.type
        while pa.types.is_list(column_type):
            path, column_type = f"{path}.list.element", column_type.value_type
        rarely_repeats = field.name in _UNREPEATED_COLUMNS
        if (
            pa.types.is_integer(column_type)
            or pa.types.is_timestamp(column_type)
            or (pa.types.is_floating(column_type) and rarely_repeats)
        ):
            byte_split_columns.append(path)
        elif not rarely_repeats and not pa.types.is_boolean(column_type):
            dictionary_columns.append(path)
    return {"use_dictionary": dictionary_columns, "use_byte_stream_split": byte_split_columns}

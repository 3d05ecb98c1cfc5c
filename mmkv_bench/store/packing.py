"""Packed tables, for publishing: few files below a size limit, in which cells with similar answers are neighbours. Slim rows
lack the values that `schema.SLIM` lists."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.store.parts import codes_of, opened, readable, sealed


def counted(path: Path) -> dict[str, int]:
    """Return the number of rows of each cell in a parquet file, by cell hash. Raises FileNotFoundError, StoreError."""
    counts: dict[str, int] = {}
    with readable(path), opened(path, ["cell"]) as file:
        for group in range(file.num_row_groups):
            for codes in file.read_row_group(group, ["cell"])["cell"].chunks:
                in_chunk = np.bincount(codes_of(codes), minlength=len(codes.dictionary)).tolist()
                for name, count in zip(codes.dictionary.to_pylist(), in_chunk, strict=True):
                    counts[name] = counts.get(name, 0) + count
    return {name: count for name, count in counts.items() if count}


Name = TypeVar("Name", str, int)


def blocks(names: Iterable[Name], counts: Mapping[Name, int], at_once: int) -> Iterator[list[Name]]:
    """Split `names`, in order, into lists with at most `at_once` rows each. A name with more rows gets its own list.

    counts: number of rows of each name.
    """
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


SHARE, AT_LEAST = 10, 3  # digests of one row in ten, and of three per cell
TIMES = ("encode_s", "vision_s", "prefill_s", "compress_s", "decode_s", "ttft_s", "tpot_s")
OF_GROUPS = (*TIMES, "peak_device_bytes", "peak_resident_bytes")
ALWAYS = ("forced_kl", "forced_agree", "reference_nll", "fork_group")


def slim(rows: pa.Table) -> pa.Table:
    """Return rows of `responses` with the values set to null that `schema.SLIM` lists, mainly times, memory peaks and
    fidelity.

    Running the cells again restores these values. Rows in git are stored in this form.

    rows: all columns, one row per cell and sample.
    """
    everywhere = pa.array(np.ones(rows.num_rows, bool))
    cells, samples = (rows[name].combine_chunks().dictionary_encode() for name in ("cell", "sample_id"))
    dropped = dict.fromkeys(OF_GROUPS, pc.equal(rows["measured"], "group")) | dict.fromkeys(ALWAYS, everywhere)
    for name, where in (dropped | {"kept_digest": pa.array(~chosen(cells, samples))}).items():
        rows = _with(rows, name, pc.if_else(where, pa.scalar(None, rows.schema.field(name).type), rows[name]))
    newest = np.full(len(cells.dictionary), np.iinfo(np.int64).min)
    of_cell = cells.indices.to_numpy()
    np.maximum.at(newest, of_cell, rows["committed_at"].cast(pa.int64()).to_numpy())
    rows = _with(rows, "committed_at", pa.array(newest[of_cell]))
    return _with(rows, "slim", everywhere)


def chosen(cells: pa.DictionaryArray, samples: pa.DictionaryArray) -> np.ndarray:
    """Choose the rows that keep their `kept_digest` in slim form. Return a mask, bool [n].

    About one in `SHARE` rows is chosen, and at least `AT_LEAST` per cell. The choice depends only on the names of cell and
    sample.

    cells, samples: cell hash and sample id of each of the n rows.
    """
    of_cell = cells.indices.to_numpy()
    with np.errstate(over="ignore"):
        mixed = _hashes(cells)[of_cell] * np.uint64(0x9E3779B97F4A7C15) + _hashes(samples)[samples.indices.to_numpy()]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    kept = mixed < np.uint64(2**64 // SHARE)
    order = np.lexsort((mixed, of_cell))
    starts = np.flatnonzero(np.append(True, np.diff(of_cell[order]) != 0)) if len(order) else order
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    kept[order[rank < AT_LEAST]] = True
    return kept


def _hashes(names: pa.DictionaryArray) -> np.ndarray:
    """Return a hash of each name in the dictionary of `names`, uint64 [names]."""
    first = [hashlib.sha256(name.encode()).digest()[:8] for name in names.dictionary.to_pylist()]
    return np.frombuffer(b"".join(first), dtype="<u8")


def _with(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    field = rows.schema.field(name)
    return rows.set_column(rows.schema.get_field_index(name), field, values.cast(field.type))


LARGEST = 9_500_000
"""Bytes of a packed file, below the limit of 10 MB of a repository of results (`scripts/weight.py`)."""
ROW_GROUP = 1 << 19
DENSEST = 19
"""Level of zstd for rows that go into git. Higher levels need half a gigabyte more to save one two-thousandth. For a million
answers
this level takes minutes to save a sixteenth of the size that `QUICK` gives."""
QUICK = 9
ALIKE = (  # columns of `cells` that define the order of rows in packed files
    *("model", "dataset", "dataset_fingerprint", "base", "method", "reading", "protocol", "budget_kind"),
    *("budget_entries", "budget_fraction", "seed", "parameters", "cell"),
)
_UNLIKE = ("answer", "config", *TIMES)  # values rarely repeat, so a dictionary would make the file longer


def is_packed(path: Path) -> bool:
    return path.name == "packed.parquet" or path.name.startswith("packed-")


def alike(cells: pa.Table) -> list[str]:
    """Return the hashes of all cells in the table `cells`, ordered so that neighbours have equal dataset, method and budget."""
    described = cells.select(ALIKE).combine_chunks()
    return described.sort_by([(name, "ascending") for name in ALIKE])["cell"].to_pylist()


def arranged(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Return the cell hashes `names` in the order of `order`. Hashes that are missing from `order` come last."""
    wanted = set(names)
    ordered_names = [name for name in order if name in wanted]
    return ordered_names + sorted(wanted.difference(ordered_names))


def ordered(rows: pa.Table, order: Sequence[str]) -> pa.Table:
    """Return rows sorted by cell, cells in the order of the list `order`.

    Rows of one cell keep their order. Rows of cells that are missing from `order` come last.
    """
    place = pc.index_in(rows["cell"], value_set=pa.array(order, pa.string())).fill_null(len(order)).to_numpy()
    return rows.take(np.argsort(place, kind="stable"))


def packed(rows: pa.Table, largest: int = LARGEST, together: str = "cell", level: int = DENSEST) -> list[bytes]:
    """Return `rows` as the contents of parquet files of at most `largest` bytes. A cell with more bytes gets one larger file.

    rows: sorted so that the rows of one cell are adjacent.
    together: the column whose values are never split between files, by default the cell.
    level: compression level of zstd.
    """
    data = sealed(
        rows,
        row_group_size=ROW_GROUP,
        compression="zstd",
        compression_level=level,
        **_encodings(rows.schema),
        dictionary_pagesize_limit=64 << 20,
        data_page_size=64 << 20,  # one page per column and row group: zstd sees all of it
        max_rows_per_page=ROW_GROUP,
    )
    names = rows[together].combine_chunks().dictionary_encode().indices.to_numpy()
    ends = np.flatnonzero(np.diff(names)) + 1
    if len(data) <= largest or not len(ends):
        return [data]
    pieces = -(-len(data) * 21 // (largest * 20))  # 5 % to spare
    wanted = np.arange(1, pieces) * rows.num_rows // pieces
    cuts = np.unique(ends[np.minimum(np.searchsorted(ends, wanted), len(ends) - 1)])
    return [
        file
        for start, end in pairwise([0, *cuts.tolist(), rows.num_rows])
        for file in packed(rows.slice(start, end - start), largest, together, level)
    ]


def _encodings(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the keyword arguments for pyarrow that set the encoding of each column.

    Integers and times get BYTE_STREAM_SPLIT, because their upper bytes hardly differ. Other columns with repeated values get
    dictionaries.
    """
    repeated, by_byte = [], []
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        unlike = field.name in _UNLIKE
        if pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or (pa.types.is_floating(kind) and unlike):
            by_byte.append(path)
        elif not unlike and not pa.types.is_boolean(kind):
            repeated.append(path)
    return {"use_dictionary": repeated, "use_byte_stream_split": by_byte}

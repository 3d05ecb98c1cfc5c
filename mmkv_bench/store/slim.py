"""Response rows as they are published: what evidence needs, without what only a machine's owner reads (`schema.SLIM`)."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SHARE, AT_LEAST = 10, 3  # digests of one row in ten, and of three per cell
TIMES = ("encode_s", "vision_s", "prefill_s", "compress_s", "decode_s", "ttft_s", "tpot_s")
OF_GROUPS = (*TIMES, "peak_device_bytes", "peak_resident_bytes")
ALWAYS = ("forced_kl", "forced_agree", "reference_nll", "fork_group")


def slim(rows: pa.Table) -> pa.Table:
    """`rows` of the table responses, one per cell and sample, all columns, without what `schema.SLIM` lists."""
    group = pc.equal(rows["measured"], "group")
    for name in OF_GROUPS:
        rows = _without(rows, name, group)
    for name in ALWAYS:
        rows = _without(rows, name, pa.array(np.ones(rows.num_rows, bool)))
    cells, samples = (rows[name].combine_chunks().dictionary_encode() for name in ("cell", "sample_id"))
    rows = _without(rows, "kept_digest", pa.array(~chosen(cells, samples)))
    newest = np.full(len(cells.dictionary), np.iinfo(np.int64).min)
    of_cell = cells.indices.to_numpy()
    np.maximum.at(newest, of_cell, rows["committed_at"].cast(pa.int64()).to_numpy())
    rows = _with(rows, "committed_at", pa.array(newest[of_cell]))
    return _with(rows, "slim", pa.array(np.ones(rows.num_rows, bool)))


def chosen(cells: pa.DictionaryArray, samples: pa.DictionaryArray) -> np.ndarray:
    """Which rows [n] keep their digest, bool [n]: a function of the names of cell and sample, whatever else there is."""
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
    """uint64 of each name in the dictionary."""
    first = [hashlib.sha256(name.encode()).digest()[:8] for name in names.dictionary.to_pylist()]
    return np.frombuffer(b"".join(first), dtype="<u8")


def _without(rows: pa.Table, name: str, where: pa.Array | pa.ChunkedArray) -> pa.Table:
    return _with(rows, name, pc.if_else(where, pa.scalar(None, rows.schema.field(name).type), rows[name]))


def _with(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    field = rows.schema.field(name)
    return rows.set_column(rows.schema.get_field_index(name), field, values.cast(field.type))

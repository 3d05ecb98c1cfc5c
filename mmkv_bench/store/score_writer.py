"""Writing scores: replace the rows of `samples` and `metrics` of some cells, in one file per table.

Writers wait for each other and for packing, because both read the existing files and remove those that no longer count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store import parts, score_files
from mmkv_bench.store.files import Staged, disk_errors
from mmkv_bench.store.folder import StoreFolder
from mmkv_bench.store.rows import digested, known_columns, refuse_rewritten
from mmkv_bench.store.schema import COLUMNS, SCHEMA_VERSION, SCHEMAS

Tables = Mapping[str, pa.Table]
"""The tables `samples` and `metrics`, checked."""
_VERSION = {"schema_version": SCHEMA_VERSION}
_KEYS = {"samples": ("cell", "sample_id", "metric"), "metrics": ("cell", "metric")}


def replace(store: StoreFolder, tables: Tables, cells: Collection[str]) -> None:
    """Replace the scores of `cells` by the rows of `tables`. A cell without rows in either table loses its scores."""
    store.prepare()
    with disk_errors("writing scores", store.root), store.locked():
        score_files.write_batch(store.root, tables, set(cells))


def replace_by(
    store: StoreFolder,
    blocks: Iterable[pa.Table],
    metrics_of: Callable[[pa.Table], pa.Table],
    beside: Collection[str] = (),
) -> None:
    """Replace the scores of cells as `Store.write_scores` says, from checked blocks.

    No lock is held while blocks come. Only one block is in memory at a time.
    """
    coming = iter(blocks)
    first, second = next(coming), next(coming, None)
    if second is None:
        metrics = _metrics(metrics_of(first), first)
        replace(store, {"samples": first, "metrics": metrics}, first["cell"].unique().to_pylist())
        return
    store.prepare()
    with disk_errors("writing scores", store.root):
        growing = score_files.GrowingScoreFile(store.root, chain([first, second], coming), beside)
        with growing.staged as samples_file:
            pa.default_memory_pool().release_unused()
            metrics = pa.concat_tables(
                [_of(_metrics(metrics_of(rows), rows), cells) for rows, cells in growing.by_metric()]
            )
            metrics = metrics.sort_by([("cell", "ascending"), ("metric", "ascending")])
            with Staged(store.file("metrics", "together"), parts.parquet(metrics)) as metrics_file, store.locked():
                staged = {"samples": samples_file, "metrics": metrics_file}
                score_files.place_batch(store.root, staged, growing.cells)


def _of(rows: pa.Table, cells: Collection[str]) -> pa.Table:
    return rows.filter(parts.is_in(rows["cell"], parts.texts_of(sorted(cells))))


def _metrics(metrics: pa.Table, samples: pa.Table) -> pa.Table:
    rows = checked("metrics", metrics)
    cells = samples["cell"].unique().to_pylist()
    if not pc.all(pc.is_in(rows["cell"], value_set=pa.array(cells, pa.string())), min_count=0).as_py():
        raise StoreError("metrics: got rows of a cell that has no samples; write both together")
    return rows


def forget(store: StoreFolder, samples: Mapping[str, Collection[str]]) -> None:
    """Drop the rows of these samples (cell to sample ids) in `samples`. The cells' metrics stay."""
    stored = store.load("samples", samples)
    pairs = [f"{cell}\0{sample}" for cell, ids in samples.items() for sample in ids]
    joined = pc.binary_join_element_wise(stored["cell"], stored["sample_id"], "\0")
    dropped = pc.is_in(joined, value_set=pa.array(pairs, pa.string()))
    cells = stored["cell"].filter(dropped).unique().to_pylist()
    if not cells:
        return
    remaining = stored.filter(pc.invert(dropped))
    metrics = store.load("metrics", cells)
    refuse_rewritten("metrics", metrics, store.root)
    replace(store, {"samples": _of(remaining, cells), "metrics": metrics}, cells)


def checked(table: str, rows: pa.Table, stamps: Mapping[str, Any] = _VERSION) -> pa.Table:
    """Return the rows with all columns of `table`, checked by the rules of `rows.check`. Nullable columns may be left out.

    stamps: values of the columns that the store writes.

    Raises StoreError naming the column or the duplicate rows.
    """
    schema = SCHEMAS[table]
    known_columns(table, rows.column_names)
    arrays = []
    for column in COLUMNS[table]:
        if column.name in stamps:
            values = pa.chunked_array([pa.repeat(pa.scalar(stamps[column.name], column.type), rows.num_rows)])
        elif column.name in rows.column_names:
            try:
                values = rows[column.name].cast(column.type)
            except pa.ArrowException as problem:
                raise StoreError(f"{table}: column {column.name!r}: {problem}") from None
        else:
            values = pa.chunked_array([pa.nulls(rows.num_rows, column.type)])
        if column.required == "always" and values.null_count:
            raise StoreError(f"{table}: column {column.name!r} is missing or null; it is required ({column.doc})")
        if column.allowed and not set(values.drop_null().unique().to_pylist()) <= set(column.allowed):
            raise StoreError(
                f"{table}: column {column.name!r} has values that are not allowed; allowed: {', '.join(column.allowed)}"
            )
        if pa.types.is_floating(column.type) and pc.any(pc.invert(pc.is_finite(values))).as_py():
            raise StoreError(f"{table}: column {column.name!r} has numbers that are not finite ({column.doc})")
        arrays.append(values)
    made = pa.Table.from_arrays(arrays, schema=schema)
    _check_rules(table, made)
    if table in _KEYS and len(np.unique(parts.keys(made, _KEYS[table]))) < made.num_rows:
        raise StoreError(f"{table}: two rows with the same {', '.join(_KEYS[table][:-1])} and metric")
    return digested(table, made) if table == "metrics" else made


def _check_rules(table: str, rows: pa.Table) -> None:
    """Raise StoreError if a row breaks a rule between columns (see `rows.check`)."""
    if table == "samples":
        broken = pc.and_(pc.not_equal(rows["status"], "ok"), pc.is_valid(rows["value"]))
        rule = "column 'value' must be null when status is not 'ok'"
    elif table == "metrics":
        short = pc.less(rows["n_ok"], rows["n"])
        wrong = pc.or_(pc.less(rows["n_ok"], 0), pc.greater(rows["n_ok"], rows["n"]))
        broken = pc.or_(wrong, pc.and_(short, pc.is_valid(rows["value"])))
        rule = "column 'n_ok' must be between 0 and n, and 'value' null unless every sample is ok"
    else:
        return
    if pc.any(broken).as_py():
        raise StoreError(f"{table}: {rule}")

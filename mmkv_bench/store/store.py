"""The result store: rows of a run on disk, safe against kill -9 at any moment, for many writers and readers at once.

A cell is one combination of model, data, prompt, method, budget, protocol, seed and numerics; rows have its hash.

Folders below the root: `journal/` (samples not yet in parquet files), `responses/` (one file per published journal),
`cells/`, `samples/` and `metrics/` (see `score_files.py`), `timings/` (one file per pass), `diagnostics/` (one file per
sample and analysis), and perhaps `.index/`, a cache (`tally.py`). `store.json` has the schema version. Nothing is
created before the first write.

No row is lost or counted twice: a sample is durable in a journal before `commit` returns. A journal is removed after
its parquet file is durable. This file has the journal's name, so publishing again after a crash writes the same file.
Readers read journals first, and keep the newest row per cell and sample.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store import journal, parts, score_files
from mmkv_bench.store.files import Staged, disk_errors, write_whole
from mmkv_bench.store.folder import StoreFolder, Writer
from mmkv_bench.store.measurements import (
    MEASUREMENT,
    PROMPT,
    committed_last,
    file_of_pass,
    file_of_sample,
    newest_passes,
)
from mmkv_bench.store.packing import rows_per_cell
from mmkv_bench.store.rows import (
    check,
    digest_of_row,
    known_columns,
    redacted_columns,
    refuse_malformed,
    refuse_other,
    refuse_rewritten,
    safe_name,
    to_table,
    with_row_digests,
)
from mmkv_bench.store.schema import COLUMNS, RESPONSES, SCHEMA_VERSION, SCHEMAS


class Store(StoreFolder):
    """A result store: all rows below one folder. Any number of processes may read and write at the same time."""

    # Before work

    def recover(self) -> int:
        """Write the journals of processes that have ended as parquet files. Return the number of samples in them.

        This only tidies up, because readers read unpublished journals. Safe while other processes write or recover.
        """
        self.check_version()
        samples = 0
        with disk_errors("recovering result rows", self.root):
            self.remove_stale_files()
            for path in self.journals():
                descriptor = journal.claim(path)
                if descriptor is None:
                    continue
                try:
                    samples += self.publish_journal(path)
                finally:
                    os.close(descriptor)
        return samples

    # Responses

    def writer(self, worker: str, publish_every: int = 256) -> Writer:
        """Return a context manager that stores answers, with its own journal.

        worker: name of the journal (letters, digits, '.', '_', '-').
        publish_every: number of samples after which a parquet file is written, and at the end.
        """
        return Writer(self, safe_name("worker", worker), publish_every)

    def done(self, cells: Iterable[str]) -> dict[str, set[str]]:
        """Map each cell to the ids of the samples that have a response row, failures included."""
        samples_by_cell: dict[str, set[str]] = {cell: set() for cell in cells}
        rows = self.responses(samples_by_cell, ("cell", "sample_id"))
        for cell, sample in zip(rows["cell"].to_pylist(), rows["sample_id"].to_pylist(), strict=True):
            samples_by_cell[cell].add(sample)
        return samples_by_cell

    def responses(
        self, cells: Iterable[str] | None = None, columns: Iterable[str] | None = None, coded: bool = False
    ) -> pa.Table:
        """Return rows of `responses`, the newest per cell and sample, sorted by both.

        cells, columns: None returns all.
        coded: return text columns dictionary-encoded.
        """
        cells = None if cells is None else set(cells)
        selected_columns = RESPONSES.names if columns is None else known_columns("responses", columns)
        needed_columns = list(dict.fromkeys([*selected_columns, "cell", "sample_id", "committed_at"]))
        # Journals first: a journal that is published between the two reads is then read twice, rather than never.
        pending_rows = [row for row in self.pending_rows() if cells is None or row["cell"] in cells]
        rows = self._in_files("responses", cells, needed_columns, coded)
        if pending_rows:
            rows = pa.concat_tables([rows, to_table("responses", pending_rows, needed_columns).cast(rows.schema)])
        rows = parts.newest(rows)
        if rows.num_rows:
            newest = pc.max(rows["committed_at"]).as_py()
            self._latest = max(self._latest or newest, newest)
        return rows.select(selected_columns)

    def counts(self, table: str) -> dict[str, int]:
        """Count the rows of `responses` (files and journals) or `samples` per cell.

        The counts are upper bounds, because replaced rows count too.
        """
        self.check_version()
        rows_by_cell: Counter[str] = Counter()
        if table == "responses":
            rows_by_cell.update(row["cell"] for row in self.pending_rows())
        for path in self.files(table):
            with suppress(FileNotFoundError):
                rows_by_cell.update(rows_per_cell(path))
        return dict(rows_by_cell)

    # Cells and scores

    def write_cells(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store rows of new cells. If a cell is stored already, its first row stays.

        Secrets in `config`, `model`, `parameters` and `generation` are redacted; hashes must be computed from the
        original values. Raises StoreError if a stored row of the same hash differs in a column that the hash covers.
        """
        stamped_values = {"schema_version": SCHEMA_VERSION, "created_at": datetime.now(UTC)}
        checked_rows = [check("cells", row, stamped_values) for row in rows]
        stored_by_cell = {
            row["cell"]: row for row in self.load("cells", [row["cell"] for row in checked_rows]).to_pylist()
        }
        for row in checked_rows:
            row |= redacted_columns(row)
            row["row_digest"] = digest_of_row("cells", row)
            if row["cell"] in stored_by_cell:
                refuse_other(stored_by_cell[row["cell"]], row, self.root)
                continue
            stored_by_cell[row["cell"]] = row
            self.prepare()
            with disk_errors("writing a cell", self.root):
                write_whole(self.file("cells", row["cell"]), parts.parquet(to_table("cells", [row])))

    def cells(
        self, cells: Iterable[str] | None = None, columns: Sequence[str] | None = None, coded: bool = False
    ) -> pa.Table:
        """Return rows of the table `cells`, one per cell.

        cells, columns: None returns all.
        coded: return text columns dictionary-encoded.

        Raises StoreError for a configuration that no run writes and, if all columns are read, for a row that does not
        match its digest.
        """
        rows = self.load("cells", cells, columns, coded)
        refuse_malformed(rows, self.root)
        if columns is None:
            refuse_rewritten("cells", rows, self.root)
        return rows

    def forget_scores(self, samples: Mapping[str, Collection[str]]) -> None:
        """Remove the scores of samples that will be answered again.

        So the new answers are scored even if the run ends early. The cells' metrics stay until scoring.

        samples: cell to sample ids.
        """
        stored_scores = self.load("samples", samples)
        dropped_keys = [f"{cell}\0{sample}" for cell, ids in samples.items() for sample in ids]
        stored_keys = pc.binary_join_element_wise(stored_scores["cell"], stored_scores["sample_id"], "\0")
        is_dropped = pc.is_in(stored_keys, value_set=pa.array(dropped_keys, pa.string()))
        if cells := stored_scores["cell"].filter(is_dropped).unique().to_pylist():
            remaining_scores = _of_cells(stored_scores.filter(pc.invert(is_dropped)), cells)
            _replace_scores(self, {"samples": remaining_scores, "metrics": self.metrics(cells)}, cells)

    def write_scores(
        self, blocks: Iterable[pa.Table], metrics_of: Callable[[pa.Table], pa.Table], beside: Collection[str] = ()
    ) -> None:
        """Replace the rows of `samples` and `metrics` of all cells in `blocks`, in one step (see `score_files.py`).

        All rows together may exceed memory.

        Args:
            blocks: rows of `samples` without `schema_version`. All rows of a cell are in one block.
            metrics_of: maps rows of `samples` to rows of `metrics`. It gets the rows of some metrics, perhaps of some
                cells only, and always those of the cells `beside`.
            beside: cells with which other cells are compared.

        Raises:
            StoreError: rows break the schema, or metrics belong to other cells.
        """
        # Writers wait for each other and for packing, because both read the existing files and remove those that no longer
        # count; no lock is held while blocks come.
        checked_blocks = (_checked("samples", rows) for rows in blocks)
        first_block, second_block = next(checked_blocks), next(checked_blocks, None)
        if second_block is None:
            metrics = _metrics(metrics_of(first_block), first_block)
            _replace_scores(
                self, {"samples": first_block, "metrics": metrics}, first_block["cell"].unique().to_pylist()
            )
            return
        self.prepare()
        with disk_errors("writing scores", self.root):
            growing_file = score_files.GrowingScoreFile(
                self.root, chain([first_block, second_block], checked_blocks), beside
            )
            with growing_file.staged as samples_file:
                pa.default_memory_pool().release_unused()
                metric_tables = (
                    _of_cells(_metrics(metrics_of(rows), rows), cells) for rows, cells in growing_file.by_metric()
                )
                metrics = pa.concat_tables(metric_tables).sort_by([("cell", "ascending"), ("metric", "ascending")])
                with Staged(self.file("metrics", "together"), parts.parquet(metrics)) as metrics_file, self.locked():
                    staged_by_table = {"samples": samples_file, "metrics": metrics_file}
                    score_files.place_batch(self.root, staged_by_table, growing_file.cells)

    def samples(
        self,
        cells: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        coded: bool = False,
        metrics: Collection[str] | None = None,
    ) -> pa.Table:
        """Return rows of the table `samples`: one metric's value for one answer of a cell.

        cells, columns, metrics: None returns all.
        coded: return text columns dictionary-encoded.
        """
        return self.load("samples", cells, columns, coded, metrics)

    def metrics(self, cells: Iterable[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return rows of the table `metrics`: one metric's value over all samples of a cell.

        cells, columns: None returns all. If all columns are read, a row that does not match its digest raises
        StoreError.
        """
        rows = self.load("metrics", cells, columns)
        if columns is None:
            refuse_rewritten("metrics", rows, self.root)
        return rows

    def write_timings(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store the rows of one timed pass. They replace those of an earlier pass with equal settings and repeat."""
        stamped_values = {"schema_version": SCHEMA_VERSION, "committed_at": self.next_time()}
        checked_rows = [check("timings", row, stamped_values) for row in rows]
        self.prepare()
        with disk_errors("writing times", self.root):
            write_whole(file_of_pass(self.root, checked_rows), parts.parquet(to_table("timings", checked_rows)))

    def timings(self, cells: Iterable[str] | None = None) -> pa.Table:
        """Return the newest rows of each timed pass (`scenario=efficiency`). cells: None returns all."""
        return newest_passes(self._in_files("timings", None if cells is None else set(cells)))

    def write_diagnostics(self, rows: pa.Table) -> Path:
        """Store the diagnostic measurements of one sample, durably. Return the path of their file.

        rows: columns of `diagnostics`, except those that the store fills. Measurements made together are in one table.

        Raises StoreError: an unknown column, a null or number that is not allowed, or rows of several samples.
        """
        stamped_values = {"schema_version": SCHEMA_VERSION, "committed_at": self.next_time()}
        rows = _checked("diagnostics", rows, stamped_values)
        self.prepare()
        path = file_of_sample(self.root, rows)
        with disk_errors("writing diagnostics", self.root):
            write_whole(path, parts.parquet(rows))
        return path

    def diagnostics(self, coded: bool = False) -> pa.Table:
        """Return the rows of `mmkv-bench diagnose`, the newest of each measurement and sample."""
        return committed_last(self._in_files("diagnostics", coded=coded), MEASUREMENT)

    def diagnosed(self, measurements: Collection[str]) -> dict[str, set[str]]:
        """Map each diagnostic measurement to the ids of the samples with stored rows."""
        samples: dict[str, set[str]] = {name: set() for name in measurements}
        rows = self._in_files("diagnostics", columns=MEASUREMENT)
        for pair in rows.group_by(list(MEASUREMENT)).aggregate([]).to_pylist():
            if pair["measurement"] in samples:
                samples[pair["measurement"]].add(pair["sample_id"])
        return samples

    def prompts(self) -> pa.Table:
        """Return rows of the table `prompts`, the newest per prompt, sample and model."""
        records = [record for path in self.journals() for record in self.records(path)]  # before files, see `responses`
        pending_prompts = [record["prompt"] for record in records if record.get("prompt")]
        return parts.newest(pa.concat_tables([self._in_files("prompts"), to_table("prompts", pending_prompts)]), PROMPT)

    def _in_files(
        self,
        table: str,
        cells: Collection[str] | None = None,
        columns: Sequence[str] | None = None,
        coded: bool = False,
    ) -> pa.Table:
        """Return the rows of a table from all of its files."""
        return self.read(table, lambda: self.files(table), columns or SCHEMAS[table].names, cells, coded)


# Scores

_VERSION_STAMP = {"schema_version": SCHEMA_VERSION}
_KEY_COLUMNS = {"samples": ("cell", "sample_id", "metric"), "metrics": ("cell", "metric")}


def _replace_scores(store: StoreFolder, tables: Mapping[str, pa.Table], cells: Collection[str]) -> None:
    """Replace the scores of some cells by the rows in `tables` (`samples`, `metrics`), or remove them without rows."""
    store.prepare()
    with disk_errors("writing scores", store.root), store.locked():
        score_files.write_batch(store.root, tables, set(cells))


def _of_cells(rows: pa.Table, cells: Collection[str]) -> pa.Table:
    return rows.filter(parts.is_in(rows["cell"], parts.texts_of(sorted(cells))))


def _metrics(metrics: pa.Table, samples: pa.Table) -> pa.Table:
    rows = _checked("metrics", metrics)
    cells = samples["cell"].unique().to_pylist()
    if not pc.all(pc.is_in(rows["cell"], value_set=pa.array(cells, pa.string())), min_count=0).as_py():
        raise StoreError("metrics: got rows of a cell that has no samples; write both together")
    return rows


def _checked(table: str, rows: pa.Table, stamps: Mapping[str, Any] = _VERSION_STAMP) -> pa.Table:
    """Check rows of `table` as `rows.check` does, and return them with all columns. Nullable columns may be missing.

    stamps: values of the columns that the store fills.

    Raises StoreError, which names the column or the duplicate rows.
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
    checked_table = pa.Table.from_arrays(arrays, schema=schema)
    _check_score_rules(table, checked_table)
    if (
        table in _KEY_COLUMNS
        and len(np.unique(parts.keys(checked_table, _KEY_COLUMNS[table]))) < checked_table.num_rows
    ):
        raise StoreError(f"{table}: two rows with the same {', '.join(_KEY_COLUMNS[table][:-1])} and metric")
    return with_row_digests(table, checked_table) if table == "metrics" else checked_table


def _check_score_rules(table: str, rows: pa.Table) -> None:
    """Raise StoreError if a row of `samples` or `metrics` breaks a rule between columns."""
    if table == "samples":
        breaks_rule = pc.and_(pc.not_equal(rows["status"], "ok"), pc.is_valid(rows["value"]))
        rule = "column 'value' must be null when status is not 'ok'"
    elif table == "metrics":
        lacks_samples = pc.less(rows["n_ok"], rows["n"])
        is_impossible = pc.or_(pc.less(rows["n_ok"], 0), pc.greater(rows["n_ok"], rows["n"]))
        breaks_rule = pc.or_(is_impossible, pc.and_(lacks_samples, pc.is_valid(rows["value"])))
        rule = "column 'n_ok' must be between 0 and n, and 'value' null unless every sample is ok"
    else:
        return
    if pc.any(breaks_rule).as_py():
        raise StoreError(f"{table}: {rule}")

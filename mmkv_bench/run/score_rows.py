"""Stored answers that scoring reads, and rows that scoring makes. Cells are read in blocks, because a dataset can
exceed memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.evaluation.extra_metrics import COLUMNS, NAMES, measured
from mmkv_bench.store.packing import blocks
from mmkv_bench.store.parts import codes_of, column_of, numbers_of, texts_in
from mmkv_bench.store.schema import SAMPLES

if TYPE_CHECKING:
    from mmkv_bench.evaluation.samples import Answer, SampleScore
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


AT_ONCE = 1 << 18  # answers read at a time, or those of one cell; a long answer counts as several
ROWS_AT_ONCE = 1 << 16  # answers whose scores and measures are in memory at a time, or those of one cell
_TOKENS = 64  # answers up to this length count as one
_OF_ANSWERS = ("sample_id", "answer", "status", "doc_id", "prompt_hash")


class Answers:
    """Stored answers of a dataset's cells (one cell is one method at one budget), read in blocks that fit into memory.

    reach: cell to 1 + index of its last answered document, for cells with answers.
    failed: indices of documents that failed in some cell.
    """

    def __init__(self, store: Store, cells: Sequence[str]) -> None:
        self._store = store
        self._held: ByCell | None = None
        rows = store.responses(cells, ("cell", "doc_id", "status", "n_tokens"), coded=True)
        codes, doc_ids = rows["cell"].combine_chunks(), numbers_of(rows["doc_id"]).astype(np.int64)
        cell_names, cell_of_row = codes.dictionary.to_pylist(), codes_of(codes)
        reach = np.zeros(len(cell_names), np.int64)
        np.maximum.at(reach, cell_of_row, doc_ids + 1)
        tokens = numbers_of(pc.fill_null(rows["n_tokens"], 0))
        units_of_row = np.maximum(tokens / _TOKENS, 1)
        answer_units_per_cell = np.bincount(cell_of_row, units_of_row, len(cell_names)).astype(np.int64)
        rows_per_cell = np.bincount(cell_of_row, minlength=len(cell_names))
        self.reach = {name: int(own) for name, own in zip(cell_names, reach, strict=True) if own}
        self._counts, self._room = (
            dict(zip(cell_names, each.tolist(), strict=True)) for each in (rows_per_cell, answer_units_per_cell)
        )
        is_ok = texts_in(rows["status"], lambda text: text == "ok").to_numpy(zero_copy_only=False)
        self.failed = np.unique(doc_ids[~is_ok]).tolist()
        del rows, codes, doc_ids, cell_of_row, tokens
        pa.default_memory_pool().release_unused()  # lmms-eval needs more than a gigabyte itself

    def blocks(self, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Yield the cells in blocks of about `AT_ONCE` answers, each while its answers are in memory."""
        columns = list(dict.fromkeys([*COLUMNS, *_OF_ANSWERS]))
        for block in _cell_blocks(cells, self._room, AT_ONCE):
            self._held = None  # free memory before the next block is read
            self._held = ByCell(self._store.responses([cell.cell for cell in block], columns))
            yield block

    def parts(self, block: Sequence[Cell]) -> Iterator[tuple[list[Cell], pa.Table]]:
        """Yield pieces of about `ROWS_AT_ONCE` answers of the current block of `blocks`, with their response rows."""
        assert self._held is not None, "a block that `blocks` gave last"
        for part in _cell_blocks(block, self._counts, ROWS_AT_ONCE):
            yield part, self._held.of(*(cell.cell for cell in part))

    def of(self, cell: str) -> dict[str, Answer]:
        """Map sample ids to a cell's answers, by document. A cell outside the current block is read from the store."""
        from mmkv_bench.evaluation.samples import Answer

        rows_of_cell = self._held.of(cell) if self._held is not None and cell in self._held.places else None
        if rows_of_cell is None:
            rows_of_cell = self._store.responses([cell], _OF_ANSWERS)
        rows_of_cell = rows_of_cell.select(_OF_ANSWERS)
        doc_ids = numbers_of(rows_of_cell["doc_id"])
        if (doc_ids[1:] < doc_ids[:-1]).any():
            rows_of_cell = rows_of_cell.take(column_of(np.argsort(doc_ids, kind="stable")))
        samples, *fields = (rows_of_cell[name].to_pylist() for name in _OF_ANSWERS)
        return dict(zip(samples, map(Answer, *fields), strict=True))


def _cell_blocks(cells: Sequence[Cell], counts: Mapping[str, int], at_once: int) -> Iterator[list[Cell]]:
    by_name = {cell.cell: cell for cell in cells}
    for names in blocks(by_name, counts, at_once):
        yield [by_name[name] for name in names]


class ByCell:
    """A table in which the rows of a cell are adjacent. places: cell to (first row, number of rows)."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        self.places: dict[str, tuple[int, int]] = {}
        if rows.num_rows:
            coded_cells = rows["cell"].combine_chunks().dictionary_encode()
            codes = coded_cells.indices.to_numpy()
            cell_starts = np.append(0, np.flatnonzero(np.diff(codes)) + 1)
            rows_per_cell = np.diff(np.append(cell_starts, len(codes)))
            cell_names = coded_cells.dictionary.take(coded_cells.indices.take(cell_starts)).to_pylist()
            starts_and_counts = zip(cell_starts.tolist(), rows_per_cell.tolist(), strict=True)
            self.places = dict(zip(cell_names, starts_and_counts, strict=True))

    def of(self, *cells: str) -> pa.Table:
        slices = [self._rows.slice(*self.places[cell]) for cell in cells if cell in self.places]
        return pa.concat_tables(slices) if slices else self._rows.slice(0, 0)


_SCHEMA = pa.schema(
    [SAMPLES.field(name) for name in ("cell", "dataset", "sample_id", "cluster", "metric", "value", "status", "parts")]
)


class SampleRows:
    """Rows of the table `samples` (one metric's value for one answer), added in any order."""

    def __init__(self) -> None:
        self._tables = [_SCHEMA.empty_table()]

    def add(self, cell: str, dataset: str, scores: Iterable[SampleScore]) -> None:
        """Add the scores of a cell's answers. Samples with status `missing` get no row."""
        present_scores = [score for score in scores if score.status != "missing"]
        if present_scores:
            fields = present_scores[0]._fields
            columns: dict[str, Sequence[Any]] = dict(zip(fields, zip(*present_scores, strict=True), strict=True))
            columns |= {"cell": [cell] * len(present_scores), "dataset": [dataset] * len(present_scores)}
            self._tables.append(pa.table({name: columns[name] for name in _SCHEMA.names}, _SCHEMA))

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows given as dicts with the columns of `_SCHEMA`."""
        self._tables.append(pa.Table.from_pylist(rows, _SCHEMA))

    def add_table(self, rows: pa.Table, without: Collection[str] = ()) -> None:
        """Add rows of an Arrow table, except those of the metrics `without`. The column `parts` may be missing."""
        if "parts" not in rows.column_names:
            rows = rows.append_column("parts", pa.nulls(rows.num_rows, _SCHEMA.field("parts").type))
        kept_rows = rows.select(_SCHEMA.names).cast(_SCHEMA)
        if without:
            kept_rows = kept_rows.filter(pc.invert(pc.is_in(kept_rows["metric"], value_set=pa.array(sorted(without)))))
        self._tables.append(kept_rows)

    def table(self) -> pa.Table:
        """Return all rows, grouped by cell in the order in which cells were added."""
        rows = pa.concat_tables(self._tables)
        cell_place_of_row = pc.index_in(rows["cell"], value_set=rows["cell"].unique()).to_numpy()
        return rows.take(np.argsort(cell_place_of_row, kind="stable"))


class Measuring:
    """Extra metrics of a dataset (`extra_metrics.py`), such as fidelity, computed from stored answers.

    cells: all cells of the dataset.
    answered: hashes of the cells that have answers.
    """

    def __init__(self, store: Store, cells: Sequence[Cell], answered: Collection[str]) -> None:
        self._store = store
        self._protocols = {cell.cell: cell.protocol for cell in cells}
        self._baselines = {cell.cell for cell in cells if cell.base == "full"}
        full_cell_by_protocol = {
            cell.protocol: cell.cell for cell in cells if cell.base == "full" and cell.cell in answered
        }
        self._full = store.responses(list(full_cell_by_protocol.values()), COLUMNS)

    def of(self, rows: pa.Table, dataset: str) -> Iterator[pa.Table]:
        """Yield tables of `samples` rows with extra metrics. rows: response rows with `extra_metrics.COLUMNS`."""
        slim_cells = rows["cell"].filter(pc.fill_null(rows["slim"], False)).unique().to_pylist()
        stored_scores = self._store.samples(slim_cells) if slim_cells else None
        if stored_scores is not None:
            stored_scores = stored_scores.filter(pc.is_in(stored_scores["metric"], value_set=pa.array(sorted(NAMES))))
        for table in measured(rows.select(COLUMNS), self._full, self._protocols, self._baselines, stored_scores):
            yield table.append_column("dataset", pa.repeat(pa.scalar(dataset), table.num_rows))

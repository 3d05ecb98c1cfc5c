"""Rows that scoring reads and makes: stored answers, rows of the table samples, extra metrics, scores of earlier judges.

Answers and scores of all cells of a dataset do not fit into memory, so cells are processed in blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mmkv_bench.evaluation.extra_metrics import COLUMNS, NAMES, measured
from mmkv_bench.judging.answers import NOT_JUDGED
from mmkv_bench.store.schema import SAMPLES
from mmkv_bench.tables.metrics import JUDGE

if TYPE_CHECKING:
    from mmkv_bench.evaluation.samples import Answer, CellScores, SampleScore
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


AT_ONCE = 1 << 18  # answers read at a time, or those of one cell; a long answer counts as several
ROWS_AT_ONCE = 1 << 16  # answers whose scores and measures are in memory at a time, or those of one cell
_TOKENS = 64  # answers up to this length count as one
_OF_ANSWERS = ("sample_id", "answer", "status", "doc_id", "prompt_hash")


class Answers:
    """The stored answers of a dataset's cells.

    reach: cell to 1 + the index of the last document that it answered, for all cells with an answer.
    failed: indices of documents whose answer failed in some cell.
    """

    def __init__(self, store: Store, cells: Sequence[str]) -> None:
        import pyarrow.compute as pc

        from mmkv_bench.store.parts import codes_of, numbers_of

        self._store = store
        self._held: ByCell | None = None
        rows = store.responses(cells, ("cell", "doc_id", "status", "n_tokens"), coded=True)
        codes, docs = rows["cell"].combine_chunks(), numbers_of(rows["doc_id"]).astype(np.int64)
        names, of_cell = codes.dictionary.to_pylist(), codes_of(codes)
        reach = np.zeros(len(names), np.int64)
        np.maximum.at(reach, of_cell, docs + 1)
        tokens = numbers_of(pc.fill_null(rows["n_tokens"], 0))
        room = np.bincount(of_cell, np.maximum(tokens / _TOKENS, 1), len(names)).astype(np.int64)
        counts = np.bincount(of_cell, minlength=len(names))
        self.reach = {name: int(own) for name, own in zip(names, reach, strict=True) if own}
        self._counts, self._room = (dict(zip(names, each.tolist(), strict=True)) for each in (counts, room))
        self.failed = np.unique(docs[~_is_ok(rows["status"])]).tolist()
        del rows, codes, docs, of_cell, tokens
        pa.default_memory_pool().release_unused()  # lmms-eval needs more than a gigabyte itself

    def blocks(self, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Split the cells, in order, into blocks of about `AT_ONCE` answers, and yield each block while its answers are in
        memory."""
        columns = list(dict.fromkeys([*COLUMNS, *_OF_ANSWERS]))
        for block in _some(cells, self._room, AT_ONCE):
            self._held = None  # free memory before the next block is read
            self._held = ByCell(self._store.responses([cell.cell for cell in block], columns))
            yield block

    def parts(self, block: Sequence[Cell]) -> Iterator[tuple[list[Cell], pa.Table]]:
        """Split the cells of the current block, in order, into pieces of about `ROWS_AT_ONCE` answers. Yield each piece with its
        response rows."""
        assert self._held is not None, "a block that `blocks` gave last"
        for part in _some(block, self._counts, ROWS_AT_ONCE):
            yield part, self._held.of(*(cell.cell for cell in part))

    def of(self, cell: str) -> dict[str, Answer]:
        """Map the sample ids of a cell to its answers, in the order of the documents."""
        from mmkv_bench.evaluation.samples import Answer
        from mmkv_bench.store.parts import column_of, numbers_of

        own = self._held.of(cell) if self._held is not None and cell in self._held.places else None
        if own is None:
            own = self._store.responses([cell], _OF_ANSWERS)
        own = own.select(_OF_ANSWERS)
        docs = numbers_of(own["doc_id"])
        if (docs[1:] < docs[:-1]).any():
            own = own.take(column_of(np.argsort(docs, kind="stable")))
        samples, *fields = (own[name].to_pylist() for name in _OF_ANSWERS)
        return dict(zip(samples, map(Answer, *fields), strict=True))


def _some(cells: Sequence[Cell], counts: Mapping[str, int], at_once: int) -> Iterator[list[Cell]]:
    from mmkv_bench.store.packing import blocks

    by_name = {cell.cell: cell for cell in cells}
    for names in blocks(by_name, counts, at_once):
        yield [by_name[name] for name in names]


class ByCell:
    """A table with adjacent rows for each cell, split by cell. places: cell to (first row, number of rows)."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        self.places: dict[str, tuple[int, int]] = {}
        if rows.num_rows:
            found = rows["cell"].combine_chunks().dictionary_encode()
            codes = found.indices.to_numpy()
            starts = np.append(0, np.flatnonzero(np.diff(codes)) + 1)
            lengths = np.diff(np.append(starts, len(codes)))
            names = found.dictionary.take(found.indices.take(starts)).to_pylist()
            self.places = dict(zip(names, zip(starts.tolist(), lengths.tolist(), strict=True), strict=True))

    def of(self, *cells: str) -> pa.Table:
        own = [self._rows.slice(*self.places[cell]) for cell in cells if cell in self.places]
        return pa.concat_tables(own) if own else self._rows.slice(0, 0)


def _is_ok(column: pa.ChunkedArray) -> np.ndarray:
    from mmkv_bench.store.parts import texts_in

    found = texts_in(column, lambda text: text == "ok")
    return found.to_numpy(zero_copy_only=False)


_COLUMNS = ("cell", "dataset", "sample_id", "cluster", "metric", "value", "status", "parts")
_HELD = 1 << 17  # rows as Python values at a time


class SampleRows:
    """Rows that are collected in any order and returned cell by cell by `table`.

    cells: the names of all cells that have a row.
    """

    def __init__(self) -> None:
        self.cells: dict[str, None] = {}
        self._tables: list[pa.Table] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def add(self, cell: str, dataset: str, scores: Iterable[SampleScore]) -> None:
        """Add the scores of a cell. Samples that are not generated yet (another shard, an interrupted run) get no row."""
        own = [score for score in scores if score.status != "missing"]
        if own:
            given: dict[str, Sequence[Any]] = dict(zip(own[0]._fields, zip(*own, strict=True), strict=True))
            given |= {"cell": [cell] * len(own), "dataset": [dataset] * len(own)}
            for name, values in self._columns.items():
                values.extend(given[name])
            self._added(cell)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows given as dicts with all columns except the schema's version."""
        cells = self._columns["cell"]
        for row in rows:
            for name, values in self._columns.items():
                values.append(row[name])
        for cell in cells[-1:]:
            self._added(cell)

    def _added(self, cell: str) -> None:
        self.cells[cell] = None
        if len(self._columns["cell"]) >= _HELD:
            self._flush()

    def add_table(self, rows: pa.Table, without: Collection[str] = ()) -> None:
        """Add the rows of a table, except those of metrics in `without`. The column `parts` may be missing."""
        import pyarrow.compute as pc

        self._flush()
        if "parts" not in rows.column_names:
            rows = rows.append_column("parts", pa.nulls(rows.num_rows, _schema().field("parts").type))
        kept = rows.select(_COLUMNS).cast(_schema())
        if without:
            kept = kept.filter(pc.invert(pc.is_in(kept["metric"], value_set=pa.array(sorted(without)))))
        self.cells |= dict.fromkeys(rows["cell"].unique().to_pylist())
        self._tables.append(kept)

    def table(self) -> pa.Table:
        """Return all rows, grouped by cell, cells in the order of their first row."""
        import pyarrow.compute as pc

        self._flush()
        rows = pa.concat_tables(self._tables)
        place = pc.index_in(rows["cell"], value_set=pa.array(list(self.cells), pa.string())).to_numpy()
        return rows.take(np.argsort(place, kind="stable"))

    def _flush(self) -> None:
        self._tables.append(pa.table(self._columns, _schema()))
        self._columns = {name: [] for name in _COLUMNS}


def _schema() -> pa.Schema:

    return pa.schema([SAMPLES.field(name) for name in _COLUMNS])


class Measuring:
    """Extra metrics of a dataset's cells (`extra_metrics.py`).

    cells: all cells of the dataset.
    answered: the cells that have answers.
    """

    def __init__(self, store: Store, cells: Sequence[Cell], answered: Collection[str]) -> None:
        self._store = store
        self._protocols = {cell.cell: cell.protocol for cell in cells}
        self._baselines = {cell.cell for cell in cells if cell.base == "full"}
        full = {cell.protocol: cell.cell for cell in cells if cell.base == "full" and cell.cell in answered}
        self._full = store.responses(list(full.values()), COLUMNS)

    def of(self, rows: pa.Table, dataset: str) -> Iterator[pa.Table]:
        """Yield rows of the table samples. rows: response rows of some cells, with the columns that the measures read."""
        import pyarrow.compute as pc

        slim = rows["cell"].filter(pc.fill_null(rows["slim"], False)).unique().to_pylist()
        before = self._store.samples(slim) if slim else None
        if before is not None:
            before = before.filter(pc.is_in(before["metric"], value_set=pa.array(sorted(NAMES))))
        for table in measured(rows.select(COLUMNS), self._full, self._protocols, self._baselines, before):
            yield table.append_column("dataset", pa.repeat(pa.scalar(dataset), table.num_rows))


Row = dict[str, Any]


@dataclass
class StoredScores:
    """Result of `keep_judged`: a cell's `samples` rows, old and new scores merged, and values for its `metrics` rows.

    judges: map of metric to the columns about its judge.
    lmms_eval: map of metric to lmms-eval's aggregate; None if the aggregate covers other samples than these.
    reasons: metric to the reason why there is no aggregate.
    """

    samples: list[Row]
    judges: dict[str, Row] = field(default_factory=dict)
    lmms_eval: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)


def keep_judged(
    fresh: Sequence[Row], stored: Sequence[Row], metrics: Sequence[Mapping[str, Any]], scores: CellScores
) -> StoredScores:
    """Merge a new pass into a cell's rows. The new scores count, except for judged metrics that would lose scores.

    Such a metric keeps every stored score whose sample has none in this pass (a stored `ok` answer never changes). If this
    pass had another judge than the stored one, the metric keeps all its stored scores, and samples without a score stay
    unjudged: scores of two judges are never averaged. The new judge's answers are in its cache, so a later pass only has to
    ask for the rest.

    fresh: `samples` rows of this pass.
    stored, metrics: the cell's stored rows of the tables `samples` and `metrics`.
    scores: the result of this pass.
    """
    rows = {(row["sample_id"], row["metric"]): row for row in fresh}
    kept = StoredScores([])
    for known in metrics if scores.not_judged else ():
        name = known["metric"]
        old = {row["sample_id"]: row for row in stored if row["metric"] == name}
        judged = {sample: row for sample, row in old.items() if row["status"] == "ok" and row["value"] is not None}
        lost = [sample for sample in judged if not _has_value(rows.get((sample, name)))]
        if known["judge"] is None or not lost:
            continue
        by = scores.judged.get(name)
        other = by is not None and tuple(by) != tuple(known[column] for column in JUDGE)
        for sample in judged if other else lost:
            rows[sample, name] = judged[sample]
        new = {sample: row for (sample, metric), row in rows.items() if metric == name}
        if other:
            new |= {sample: row | {"value": None} for sample, row in new.items() if sample not in judged}
            rows |= {(sample, name): row for sample, row in new.items()}
        kept.judges[name] = {column: known[column] for column in JUDGE}
        answered = [row for row in new.values() if row["status"] == "ok"]
        waiting = sum(row["value"] is None for row in answered)
        same = new.keys() == old.keys() and not waiting
        kept.lmms_eval[name] = known["lmms_eval"] if same else None
        if waiting:
            why = scores.not_judged.get(name, "").split(": ", 2)[-1] or "this judge did not answer for all"
            kept.reasons[name] = f"{NOT_JUDGED}: {waiting} of {len(answered)} samples: {why}"
        else:
            together = f"{NOT_JUDGED} in one pass, which lmms-eval's aggregate needs"
            kept.reasons[name] = known["lmms_eval_reason"] if same else scores.reason or together
    kept.samples = list(rows.values())
    return kept


def _has_value(row: Mapping[str, Any] | None) -> bool:
    return row is not None and row["value"] is not None

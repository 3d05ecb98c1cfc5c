"""The score stage: stored answers through lmms-eval's own metric code; no model is loaded.

Every part of the store is read once for all cells of a dataset, and their scores are written together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.judging.configured import not_judged
from mmkv_bench.run.sample_rows import SampleRows

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.datasets.task_spec import TaskSpec
    from mmkv_bench.evaluation.contract import CellScores
    from mmkv_bench.judging.ledger import Ledger
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.rows import ReadOnce

_ANSWER_COLUMNS = ("cell", "sample_id", "answer", "status", "doc_id", "prompt_hash")


def unscored(
    store: Store, cells: Sequence[Cell], judge: Ledger | None = None, rows: ReadOnce | None = None
) -> list[str]:
    """Cells whose stored answers are not the ones that were scored: new samples, never scored, or for the judge to do.

    rows: those of the cells, where some were read already.
    """
    names = [cell.cell for cell in cells]
    columns = ("cell", "sample_id", "status")
    answered = store.responses(names, columns, coded=True) if rows is None else rows.responses.select(columns)
    scored = store.samples(names, columns, coded=True) if rows is None else rows.samples.select(columns)
    metrics = (store.metrics(names) if rows is None else rows.metrics).to_pylist()
    with_metrics = {row["cell"] for row in metrics}
    to_judge = {row["cell"] for row in metrics if judge is not None and _to_judge(row, judge)}
    changed, found = _changed(answered, scored), set(answered["cell"].unique().to_pylist())
    return [
        name for name in names if name in found and (name in changed or name not in with_metrics or name in to_judge)
    ]


def _changed(answered: pa.Table, scored: pa.Table) -> set[str]:
    """Cells of which one table has a sample and status that the other has not."""
    import numpy as np
    import pyarrow as pa

    from mmkv_bench.store.parts import keys

    both = pa.concat_tables([answered, scored])
    key = keys(both, both.column_names)
    differing = np.setxor1d(key[: answered.num_rows], key[answered.num_rows :])
    return set(both["cell"].filter(pa.array(np.isin(key, differing))).unique().to_pylist())


def _to_judge(row: Mapping[str, Any], judge: Ledger) -> bool:
    """Whether a stored metric lacks an answer of this judge: it was not judged, or by another one."""
    if judge.settings is None:
        return False
    if not_judged(row):
        return True
    wanted = judge.settings.temperature
    other = row["judge"] != judge.model or (wanted is not None and row["judge_temperature"] != wanted)
    return row["judge"] is not None and other


def score_dataset(
    store: Store,
    spec: TaskSpec,
    cells: Sequence[Cell],
    after: Callable[[Cell], None] = lambda cell: None,
    judge: Ledger | None = None,
    stale: Collection[str] | None = None,
) -> int:
    """Score what is not scored yet, then the metrics of all cells of the dataset (differences need `full`).

    Args:
        spec: the task; cells: this run's cells of it; after: told about each scored cell; judge: where the questions of
            scorers go, None = nowhere. What an earlier judge gave stands where this one gives nothing (kept_scores.py).
        stale: the cells to score, where they are known; None: those that are `unscored`.

    Returns:
        How many cells were scored anew; 0 leaves the store untouched.

    Raises:
        ScoringError: lmms-eval's metric code failed; the answers stay as they are.
    """
    from mmkv_bench.evaluation import release, score_many
    from mmkv_bench.tables.metrics import metrics_rows
    from mmkv_bench.tables.rows import frame

    stale = set(unscored(store, cells, judge) if stale is None else stale)
    if not stale:
        return 0
    scored = _Scored(store, cells, stale)
    answers = _Answers(store, stale)
    by_name = {cell.cell: cell for cell in cells}
    for name, scores in score_many(spec, [cell.cell for cell in cells if cell.cell in stale], answers.of, judge):
        scored.add(by_name[name], scores)
        after(by_name[name])
    release()
    _add_measures(store, cells, scored.rows)
    samples = scored.rows.table()
    described = store.cells(samples["cell"].unique().to_pylist()).to_pandas()
    metrics = metrics_rows(
        frame(samples), described, lmms_eval=scored.aggregates, reasons=scored.reasons, judges=scored.judges
    )
    store.write_scores_of(samples, _metrics_table(metrics))
    return len(stale)


class _Scored:
    """The rows of a dataset's cells while they are scored: those of cells that stay as they are, and new ones.

    aggregates, judges: (cell, metric) -> lmms-eval's aggregate, the judge's columns; reasons: cell, or cell and metric ->
    why there is no aggregate.
    """

    def __init__(self, store: Store, cells: Sequence[Cell], stale: set[str]) -> None:
        from mmkv_bench.evaluation.measures import NAMES

        names = [cell.cell for cell in cells]
        self.rows = SampleRows()
        self.aggregates: dict[tuple[str, str], float | None] = {}
        self.reasons: dict[str | tuple[str, str], str | None] = {}
        self.judges: dict[tuple[str, str], dict[str, Any]] = {}
        self._metrics: dict[str, list[dict[str, Any]]] = {}
        self._stored = _Cells(store.samples([name for name in names if name in stale]))
        self.rows.add_table(store.samples([name for name in names if name not in stale]), without=NAMES)
        for row in store.metrics(names).to_pylist():
            self._metrics.setdefault(row["cell"], []).append(row)
            if row["cell"] not in stale:
                self._keep(row)

    def _keep(self, row: Mapping[str, Any]) -> None:
        from mmkv_bench.tables.metrics import JUDGE

        key = row["cell"], row["metric"]
        self.aggregates |= {key: row["lmms_eval"]} if row["lmms_eval"] is not None else {}
        self.reasons |= {key: row["lmms_eval_reason"]} if row["lmms_eval_reason"] is not None else {}
        self.judges[key] = {name: row[name] for name in JUDGE}

    def add(self, cell: Cell, scores: CellScores) -> None:
        """What a pass gave a cell; what an earlier judge gave stays where it gave nothing."""
        from mmkv_bench.run.kept_scores import keep_judged
        from mmkv_bench.tables.metrics import JUDGE

        name = cell.cell
        for metric, value in (scores.aggregate or {}).items():
            self.aggregates[name, metric] = value
        if scores.reason is not None:
            self.reasons[name] = scores.reason
        self.reasons |= {(name, metric): why for metric, why in (scores.unaggregated | scores.not_judged).items()}
        self.judges |= {(name, metric): dict(zip(JUDGE, by, strict=True)) for metric, by in scores.judged.items()}
        if not scores.not_judged:
            self.rows.add(name, cell.dataset, scores.samples)
            return
        fresh = SampleRows()
        fresh.add(name, cell.dataset, scores.samples)
        stored = self._stored.of(name).drop_columns(["schema_version"]).to_pylist()
        kept = keep_judged(fresh.table().to_pylist(), stored, self._metrics.get(name, []), scores)
        self.rows.add_rows(kept.samples)
        self.judges |= {(name, metric): by for metric, by in kept.judges.items()}
        self.aggregates |= {(name, metric): value for metric, value in kept.lmms_eval.items()}
        self.reasons |= {(name, metric): why for metric, why in kept.reasons.items()}


class _Cells:
    """A table cut by cell; the rows of a cell stand together."""

    def __init__(self, rows: pa.Table) -> None:
        import numpy as np

        self._rows = rows
        if not rows.num_rows:
            self._places: dict[str, tuple[int, int]] = {}
            return
        found = rows["cell"].combine_chunks().dictionary_encode()
        codes = found.indices.to_numpy()
        starts = np.append(0, np.flatnonzero(np.diff(codes)) + 1)
        lengths = np.diff(np.append(starts, len(codes)))
        names = found.dictionary.take(found.indices.take(starts)).to_pylist()
        self._places = dict(zip(names, zip(starts.tolist(), lengths.tolist(), strict=True), strict=True))

    def of(self, cell: str) -> pa.Table:
        return self._rows.slice(*self._places.get(cell, (0, 0)))


class _Answers:
    """The stored answers of cells."""

    def __init__(self, store: Store, cells: set[str]) -> None:
        self._cells = _Cells(store.responses(cells, _ANSWER_COLUMNS))

    def of(self, cell: str) -> dict[str, Any]:
        """Sample id -> answer, in the order of the documents."""
        from mmkv_bench.evaluation import Answer

        own = self._cells.of(cell)
        columns = (own[name].to_pylist() for name in ("doc_id", "sample_id", "answer", "status", "prompt_hash"))
        return {
            sample: Answer(text, status, doc_id, prompt)
            for doc_id, sample, text, status, prompt in sorted(zip(*columns, strict=True), key=lambda row: row[0])
        }


def _add_measures(store: Store, cells: Sequence[Cell], rows: SampleRows) -> None:
    """Put the measures of stored rows beside the task's scores, of every cell anew: they need the rows of `full`, which
    may have come later than a cell's. What slim rows have lost stays as it is stored.

    Beyond the stored columns memory holds some numbers per answer, and the rows of one cell or of
    `agreement.AT_ONCE` answers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from mmkv_bench.evaluation.agreement import agreement, bare
    from mmkv_bench.evaluation.measures import COLUMNS

    answers = store.responses(rows.cells, COLUMNS)
    found = set(answers["cell"].unique().to_pylist())
    cells = [cell for cell in cells if cell.cell in found]
    protocols = {cell.cell: cell.protocol for cell in cells}
    full = {cell.protocol: cell.cell for cell in cells if cell.base == "full"}
    answers = answers.filter(pc.is_in(answers["cell"], value_set=pa.array(list(protocols), pa.string())))
    quick = bare(answers, full, protocols)
    if cells:
        for table in agreement(answers, quick, full, protocols):
            rows.add_table(table.append_column("dataset", pa.repeat(pa.scalar(cells[0].dataset), table.num_rows)))
    _add_others(store, [cell for cell in cells if cell.cell not in quick], full, answers, rows)


def _add_others(
    store: Store, cells: Sequence[Cell], full: Mapping[str, str], answers: pa.Table, rows: SampleRows
) -> None:
    """The measures of cells of which more is known than answers, cell by cell."""
    import pyarrow.compute as pc

    from mmkv_bench.evaluation.measures import measured, stored

    if not cells:
        return
    slim = set(answers["cell"].filter(pc.fill_null(answers["slim"], False)).unique().to_pylist())
    answered, before = _Cells(answers), _Cells(store.samples(slim))
    of_full = {
        protocol: {row["sample_id"]: row for row in answered.of(cell).to_pylist()} for protocol, cell in full.items()
    }
    for cell in cells:
        own, known = answered.of(cell.cell).to_pylist(), stored(before.of(cell.cell).to_pylist())
        scores = measured(own, of_full.get(cell.protocol, {}), cell.protocol, cell.base == "full", known)
        rows.add(cell.cell, cell.dataset, scores)


def _metrics_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    from mmkv_bench.store.schema import METRICS

    fields = [field for field in METRICS if field.name != "schema_version"]
    return pa.table({field.name: pa.array([row[field.name] for row in rows], field.type) for field in fields})

"""The score stage: lmms-eval's own metric code scores stored answers, without a model.

A cell is one row of the result tables: one method at one budget on one dataset.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mmkv_bench.evaluation.extra_metrics import NAMES
from mmkv_bench.evaluation.fingerprints import files_as_scored, scorer_digest, scorer_files
from mmkv_bench.judging.answers import NOT_JUDGED, not_judged
from mmkv_bench.run.score_rows import Answers, ByCell, Measuring, SampleRows
from mmkv_bench.store.packing import blocks, in_cell_order, similarity_order
from mmkv_bench.store.parts import keys
from mmkv_bench.store.schema import METRICS
from mmkv_bench.store.tally import digests_of_cells, tally
from mmkv_bench.tables.metric_rows import JUDGE, metrics_rows
from mmkv_bench.tables.score_consistency import SUM_COLUMNS, miscounted_cells, sums_of
from mmkv_bench.tables.stored_rows import ReadOnce, frame

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import CellScores
    from mmkv_bench.judging.answers import JudgeAnswers
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


EVIDENCE_COLUMNS = ("answers_digest", "scorer_digest", "scorer_files")
"""Columns of the table `metrics` that identify the scored answers and the scorer."""
AT_ONCE = 1 << 21  # answers and scores compared at a time
Row = dict[str, Any]
_NO_SCORE: Row = {"value": None}


def cells_to_score(
    store: Store,
    cells: Sequence[Cell],
    judge: JudgeAnswers | None = None,
    rows: ReadOnce | None = None,
    specs: Mapping[str, TaskSpec] | None = None,
    undigested: bool = False,
) -> list[str]:
    """Return the hashes of the cells whose answers must be scored.

    These are cells without scores, and cells whose answers, scorer (code or files) or judge differ from those of the
    stored scores. Cells whose metrics contradict their scores per sample are included too.

    judge: the judge that scorers may ask; None for no judge.
    rows: the cells' rows, if they were read already.
    specs: dataset to task. Only scorers of these datasets are checked for changes.
    undigested: also return cells whose scores have no digest of the answers, because an older version stored them.
    """
    cell_names = [cell.cell for cell in cells]
    metrics = (store.metrics(cell_names) if rows is None else rows.metrics).to_pylist()
    outdated_cells = _cells_with_outdated_scores(store, metrics, specs or {}, undigested)
    with_metrics = {row["cell"] for row in metrics}
    cells_to_judge = {row["cell"] for row in metrics if judge is not None and _needs_judge(row, judge)}
    changed_cells: set[str] = set()
    answered_cells: set[str] = set()
    for answered, scored in _answers_and_scores(store, cell_names, rows):
        changed_cells |= _cells_with_other_samples(answered, scored.select(answered.column_names))
        sums_by_cell, cells_of_block = sums_of(scored), set(answered["cell"].unique().to_pylist())
        metrics_of_block = [row for row in metrics if row["cell"] in cells_of_block]
        totals_of_metrics = [(row, sums_by_cell.get((row["cell"], row["metric"]))) for row in metrics_of_block]
        changed_cells |= miscounted_cells(sums_by_cell, metrics_of_block) | {
            row["cell"] for row, total in totals_of_metrics if total and total.contradicts(row)
        }
        answered_cells |= cells_of_block
    return [
        name
        for name in cell_names
        if name in answered_cells
        and (name in changed_cells or name not in with_metrics or name in cells_to_judge or name in outdated_cells)
    ]


def _cells_with_outdated_scores(
    store: Store, metrics: Sequence[Mapping[str, Any]], specs: Mapping[str, TaskSpec], undigested: bool
) -> set[str]:
    """Return the cells whose stored scores belong to other answers or to another version of the scorer.

    metrics: the cells' rows of the table `metrics`.
    specs, undigested: see `cells_to_score`.
    """
    digested_metrics = [row for row in metrics if row["answers_digest"] is not None]
    outdated_cells = {row["cell"] for row in metrics if undigested and row["answers_digest"] is None}
    stored_digests = tally(store).digests if digested_metrics else {}
    outdated_cells |= {
        row["cell"] for row in digested_metrics if stored_digests.get(row["cell"], (0, ""))[1] != row["answers_digest"]
    }
    digest_by_dataset = {name: scorer_digest(spec) for name, spec in specs.items()}
    changed_by_files: dict[tuple[str, str], bool] = {}
    for row in digested_metrics:
        if row["dataset"] not in digest_by_dataset:
            continue
        key = row["dataset"], row["scorer_files"] or "{}"
        if key not in changed_by_files:
            changed_by_files[key] = files_as_scored(specs[key[0]], key[1])
        if row["scorer_digest"] != digest_by_dataset[row["dataset"]] or not changed_by_files[key]:
            outdated_cells.add(row["cell"])
    return outdated_cells


def _answers_and_scores(
    store: Store, names: Sequence[str], rows: ReadOnce | None
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield (answers, scores) of all cells `names`, or per block of cells: two tables with cell, sample and status."""
    columns = ("cell", "sample_id", "status")
    if rows is not None and not rows.large:
        yield rows.responses.select(columns), rows.samples
        return
    rows_by_cell = Counter(store.counts("responses")) + Counter(store.counts("samples"))
    for own in blocks(names, rows_by_cell, AT_ONCE):
        yield store.responses(own, columns, coded=True), store.samples(own, SUM_COLUMNS, coded=True)


def _cells_with_other_samples(answered: pa.Table, scored: pa.Table) -> set[str]:
    """Return the cells that have a (sample, status) in only one of the two tables."""
    all_rows = pa.concat_tables([answered, scored])
    key = keys(all_rows, all_rows.column_names)
    differing_keys = np.setxor1d(key[: answered.num_rows], key[answered.num_rows :])
    return set(all_rows["cell"].filter(pa.array(np.isin(key, differing_keys))).unique().to_pylist())


def _needs_judge(row: Mapping[str, Any], judge: JudgeAnswers) -> bool:
    """Tell whether a row of the table `metrics` lacks a judge's scores or has those of another judge."""
    if judge.settings is None:
        return False
    if not_judged(row):
        return True
    wanted_temperature = judge.settings.temperature
    is_other_judge = row["judge"] != judge.model or (
        wanted_temperature is not None and row["judge_temperature"] != wanted_temperature
    )
    return row["judge"] is not None and is_other_judge


def score_dataset(
    store: Store,
    spec: TaskSpec,
    cells: Sequence[Cell],
    after: Callable[[], object] = lambda: None,
    judge: JudgeAnswers | None = None,
    stale: Collection[str] | None = None,
) -> int:
    """Score the dataset's cells whose scores are missing or outdated, and compute the metrics of all its cells.

    The metrics of all cells are computed because some are differences to the full cache.

    Args:
        spec: the task.
        cells: the plan's cells of the task.
        after: called after each scored cell.
        judge: the judge that scorers may ask; None for no judge.
        stale: hashes of the cells to score; None computes them by `cells_to_score`.

    Returns:
        The number of newly scored cells. If it is 0, nothing is written.

    Raises:
        ScoringError: lmms-eval's metric code failed.
    """
    from mmkv_bench.evaluation.captions import release
    from mmkv_bench.evaluation.grader import Grader
    from mmkv_bench.evaluation.task_code import opened

    stale = set(cells_to_score(store, cells, judge) if stale is None else stale)
    if not stale:
        return 0
    cell_rows = store.cells([cell.cell for cell in cells])
    cell_by_name = {cell.cell: cell for cell in cells}
    packed_order = in_cell_order(cell_by_name, similarity_order(cell_rows))
    cells = [cell_by_name[name] for name in packed_order]
    answers = Answers(store, list(cell_by_name))
    scored, measuring = _Scored(store, cell_rows, stale), Measuring(store, cells, answers.reach)
    del cell_rows

    def all_rows() -> Iterator[pa.Table]:
        reach_by_cell = {cell.cell: answers.reach[cell.cell] for cell in cells if cell.cell in stale}
        scorer = Grader(spec, reach_by_cell, answers.of, judge, answers.failed)
        for block in answers.blocks(cells):
            yield from rows_of(block, scorer.scores([cell.cell for cell in block if cell.cell in stale]))

    def rows_of(block: Sequence[Cell], scores: Iterator[tuple[str, CellScores]]) -> Iterator[pa.Table]:
        """Yield the `samples` rows of a block. A function, so variables are freed before the next block is read."""
        for part, rows in answers.parts(block):
            scored.begin(part)
            scored.answers |= {name: digest for name, digest in digests_of_cells(rows).items() if name in stale}
            for cell in part:
                if cell.cell in stale:
                    name, cell_scores = next(scores)
                    assert name == cell.cell, "scores come in the order of the cells"
                    scored.add(cell, cell_scores)
                    after()
            for measures in measuring.of(rows, part[0].dataset):
                scored.rows.add_table(measures)
            yield scored.rows.table()

    scored.scorer = scorer_digest(spec)
    with opened() as opened_files:
        scored.files = lambda: scorer_files(spec, opened_files, store.root)
        store.write_scores(all_rows(), scored.metrics, beside=[cell.cell for cell in cells if cell.base == "full"])
    release()
    return len(stale)


class _Scored:
    """Old and new scores of a dataset's cells. Only `rows` has scores per sample, and only of a few cells at a time.

    rows: `samples` rows of the current cells.
    aggregates: (cell, metric) to lmms-eval's aggregate.
    judges: (cell, metric) to the columns about the judge.
    reasons: cell, or (cell, metric), to the reason why there is no aggregate.
    answers: cell to the digest of the scored answers.
    scorer: digest of the scorer's code.
    files: returns the files that the scorer has opened so far.
    """

    def __init__(self, store: Store, cells: pa.Table, stale: set[str]) -> None:
        self._store, self._stale = store, stale
        self._cell_rows = cells.to_pandas()
        self.rows = SampleRows()
        self.aggregates: dict[tuple[str, str], float | None] = {}
        self.reasons: dict[str | tuple[str, str], str | None] = {}
        self.judges: dict[tuple[str, str], Row] = {}
        self.answers: dict[str, str] = {}
        self.scorer: str | None = None
        self.files: Callable[[], Mapping[str, str]] = dict
        self._evidence: dict[str, Row] = {}
        self._metrics: dict[str, list[Row]] = {}
        for row in store.metrics(cells["cell"].to_pylist()).to_pylist():
            self._metrics.setdefault(row["cell"], []).append(row)
            if row["cell"] not in stale:
                self._keep_metric(row)

    def begin(self, cells: Sequence[Cell]) -> None:
        """Make `cells` the current cells. `rows` then has the stored scores of those that are not scored again."""
        cell_names = [cell.cell for cell in cells]
        self.rows = SampleRows()
        self._stored = ByCell(self._store.samples([name for name in cell_names if name in self._stale]))
        self.rows.add_table(
            self._store.samples([name for name in cell_names if name not in self._stale]), without=NAMES
        )

    def _keep_metric(self, row: Mapping[str, Any]) -> None:
        key = row["cell"], row["metric"]
        self.aggregates |= {key: row["lmms_eval"]} if row["lmms_eval"] is not None else {}
        self.reasons |= {key: row["lmms_eval_reason"]} if row["lmms_eval_reason"] is not None else {}
        self.judges[key] = {name: row[name] for name in JUDGE}
        self._evidence[row["cell"]] = {name: row[name] for name in EVIDENCE_COLUMNS}

    def add(self, cell: Cell, scores: CellScores) -> None:
        """Add a cell's scores from one pass of the scorer."""
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
        fresh_rows = SampleRows()
        fresh_rows.add(name, cell.dataset, scores.samples)
        rows = {(row["sample_id"], row["metric"]): row for row in fresh_rows.table().to_pylist()}
        stored_rows = self._stored.of(name).drop_columns(["schema_version"]).to_pylist()
        for known in self._metrics.get(name, []):
            if known["judge"] is not None:
                self._keep_judged(known, [row for row in stored_rows if row["metric"] == known["metric"]], rows, scores)
        self.rows.add_rows(list(rows.values()))

    def _keep_judged(
        self, known: Row, stored: Sequence[Row], rows: dict[tuple[str, str], Row], scores: CellScores
    ) -> None:
        """Keep stored scores of a judged metric that this pass of the scorer lacks.

        If there are such scores and this pass asked another judge, all stored scores stay and no new ones are added, so
        that scores of two judges are never averaged. The new judge's verdicts are cached for a later pass.

        known, stored: the metric's stored row of the table `metrics`, and its stored rows of `samples`.
        rows: (sample, metric) to the rows of this pass; changed in place.
        scores: the result of this pass.
        """
        name, metric = known["cell"], known["metric"]
        judged_by_sample = {
            row["sample_id"]: row for row in stored if row["status"] == "ok" and row["value"] is not None
        }
        lost_samples = [sample for sample in judged_by_sample if rows.get((sample, metric), _NO_SCORE)["value"] is None]
        if not lost_samples:
            return
        judge_of_pass = scores.judged.get(metric)
        is_other_judge = judge_of_pass is not None and tuple(judge_of_pass) != tuple(known[column] for column in JUDGE)
        rows |= {
            (sample, metric): judged_by_sample[sample]
            for sample in (judged_by_sample if is_other_judge else lost_samples)
        }
        new_by_sample = {sample: row for (sample, its), row in rows.items() if its == metric}
        if is_other_judge:
            new_by_sample |= {
                sample: row | {"value": None} for sample, row in new_by_sample.items() if sample not in judged_by_sample
            }
            rows |= {(sample, metric): row for sample, row in new_by_sample.items()}
        answered_rows = [row for row in new_by_sample.values() if row["status"] == "ok"]
        unjudged_rows = sum(row["value"] is None for row in answered_rows)
        keeps_aggregate = new_by_sample.keys() == {row["sample_id"] for row in stored} and not unjudged_rows
        self.judges[name, metric] = {column: known[column] for column in JUDGE}
        self.aggregates[name, metric] = known["lmms_eval"] if keeps_aggregate else None
        if unjudged_rows:
            reason = scores.not_judged.get(metric, "").split(": ", 2)[-1] or "this judge did not answer for all"
            self.reasons[name, metric] = f"{NOT_JUDGED}: {unjudged_rows} of {len(answered_rows)} samples: {reason}"
        else:
            one_pass_reason = f"{NOT_JUDGED} in one pass, which lmms-eval's aggregate needs"
            self.reasons[name, metric] = (
                known["lmms_eval_reason"] if keeps_aggregate else scores.reason or one_pass_reason
            )

    def metrics(self, samples: pa.Table) -> pa.Table:
        """Compute rows of the table `metrics` from `samples` rows, which have all samples of each (cell, metric)."""
        own_cells = self._cell_rows[self._cell_rows["cell"].isin(samples["cell"].unique().to_pylist())]
        metric_rows = metrics_rows(
            frame(samples), own_cells, lmms_eval=self.aggregates, reasons=self.reasons, judges=self.judges
        )
        pa.default_memory_pool().release_unused()
        files_json = json.dumps(dict(self.files()), sort_keys=True)
        new_evidence = {"scorer_digest": self.scorer, "scorer_files": None if files_json == "{}" else files_json}
        no_evidence = dict.fromkeys(EVIDENCE_COLUMNS)
        for row in metric_rows:
            digest = self.answers.get(row["cell"])
            row |= (
                self._evidence.get(row["cell"], no_evidence)
                if digest is None
                else {**new_evidence, "answers_digest": digest}
            )
        store_columns = ("schema_version", "row_digest")  # which the store adds
        return pa.Table.from_pylist(
            metric_rows, pa.schema([field for field in METRICS if field.name not in store_columns])
        )

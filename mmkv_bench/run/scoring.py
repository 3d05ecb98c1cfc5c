"""The score stage: stored answers go through lmms-eval's own metric code, without loading a model.

Every part of the store is read once for all cells of a dataset, and their scores are written together.
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
from mmkv_bench.store.packing import alike, arranged, blocks
from mmkv_bench.store.parts import keys
from mmkv_bench.store.schema import METRICS
from mmkv_bench.store.tally import digests_of_cells, tally
from mmkv_bench.tables.metrics import JUDGE, metrics_rows
from mmkv_bench.tables.rows import ReadOnce, frame
from mmkv_bench.tables.score_consistency import SUMMED, cells_beside, sums_of

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import CellScores
    from mmkv_bench.judging.answers import JudgeAnswers
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


EVIDENCE = ("answers_digest", "scorer_digest", "scorer_files")
"""Columns of `metrics` that identify the scored answers and the scorer."""
AT_ONCE = 1 << 21  # answers and scores compared at a time
Row = dict[str, Any]
_NO_SCORE: Row = {"value": None}


def unscored(
    store: Store,
    cells: Sequence[Cell],
    judge: JudgeAnswers | None = None,
    rows: ReadOnce | None = None,
    specs: Mapping[str, TaskSpec] | None = None,
    undigested: bool = False,
) -> list[str]:
    """Return the cells that need scoring. A cell does if it was never scored, its answers or samples differ from the scored ones,
    its metrics contradict its scores, its scorer's code or files changed, or the judge has not judged it.

    rows: the cells' rows, if some were read already.
    specs: dataset to task. Scorers are checked for changes in these datasets only.
    undigested: also return cells whose scores were stored without a digest of the answers, by an older version.
    """
    names = [cell.cell for cell in cells]
    metrics = (store.metrics(names) if rows is None else rows.metrics).to_pylist()
    other = _otherwise_scored(store, metrics, specs or {}, undigested)
    with_metrics = {row["cell"] for row in metrics}
    to_judge = {row["cell"] for row in metrics if judge is not None and _to_judge(row, judge)}
    changed: set[str] = set()
    found: set[str] = set()
    for answered, scored in _standing(store, names, rows):
        changed |= _changed(answered, scored.select(answered.column_names))
        sums, among = sums_of(scored), set(answered["cell"].unique().to_pylist())
        ours = [row for row in metrics if row["cell"] in among]
        totals = [(row, sums.get((row["cell"], row["metric"]))) for row in ours]
        changed |= cells_beside(sums, ours) | {row["cell"] for row, total in totals if total and total.contradicts(row)}
        found |= among
    return [
        name
        for name in names
        if name in found and (name in changed or name not in with_metrics or name in to_judge or name in other)
    ]


def _otherwise_scored(
    store: Store, metrics: Sequence[Mapping[str, Any]], specs: Mapping[str, TaskSpec], undigested: bool
) -> set[str]:
    """Return the cells whose stored scores belong to other answers than the stored ones, or to another version of the scorer."""
    digested = [row for row in metrics if row["answers_digest"] is not None]
    other = {row["cell"] for row in metrics if undigested and row["answers_digest"] is None}
    held = tally(store).digests if digested else {}
    other |= {row["cell"] for row in digested if held.get(row["cell"], (0, ""))[1] != row["answers_digest"]}
    scorers = {name: scorer_digest(spec) for name, spec in specs.items()}
    files: dict[tuple[str, str], bool] = {}
    for row in digested:
        if row["dataset"] not in scorers:
            continue
        key = row["dataset"], row["scorer_files"] or "{}"
        if key not in files:
            files[key] = files_as_scored(specs[key[0]], key[1])
        if row["scorer_digest"] != scorers[row["dataset"]] or not files[key]:
            other.add(row["cell"])
    return other


def _standing(store: Store, names: Sequence[str], rows: ReadOnce | None) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield (answers, scores) of the cells `names`, each with cell, sample and status. If there are many rows, split them by
    cell.
    """
    columns = ("cell", "sample_id", "status")
    if rows is not None and not rows.large:
        yield rows.responses.select(columns), rows.samples
        return
    counts = Counter(store.counts("responses")) + Counter(store.counts("samples"))
    for own in blocks(names, counts, AT_ONCE):
        yield store.responses(own, columns, coded=True), store.samples(own, SUMMED, coded=True)


def _changed(answered: pa.Table, scored: pa.Table) -> set[str]:
    """Return the cells with a pair of sample and status that is in only one of the tables."""
    both = pa.concat_tables([answered, scored])
    key = keys(both, both.column_names)
    differing = np.setxor1d(key[: answered.num_rows], key[answered.num_rows :])
    return set(both["cell"].filter(pa.array(np.isin(key, differing))).unique().to_pylist())


def _to_judge(row: Mapping[str, Any], judge: JudgeAnswers) -> bool:
    """Tell whether a metric needs this judge, because the stored scores are unjudged or come from another judge."""
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
    after: Callable[[], object] = lambda: None,
    judge: JudgeAnswers | None = None,
    stale: Collection[str] | None = None,
) -> int:
    """Score what is not scored yet, then compute the metrics of all cells of the dataset (differences need `full`).

    Args:
        spec: the task.
        cells: this run's cells of the task.
        after: called after each scored cell.
        judge: answers the scorers' questions; None asks nobody. An earlier judge's scores stay if this judge gives none
            (score_rows.py).
        stale: the cells to score, if known; None computes them by `unscored`.

    Returns:
        The number of newly scored cells; 0 leaves the store untouched.

    Raises:
        ScoringError: lmms-eval's metric code failed; the answers stay unchanged.
    """
    from mmkv_bench.evaluation.captions import release
    from mmkv_bench.evaluation.grader import Grader
    from mmkv_bench.evaluation.task_code import opened

    stale = set(unscored(store, cells, judge) if stale is None else stale)
    if not stale:
        return 0
    described = store.cells([cell.cell for cell in cells])
    named = {cell.cell: cell for cell in cells}
    cells = [named[name] for name in arranged(named, alike(described))]  # in the order of packed files
    answers = Answers(store, list(named))
    scored, measuring = _Scored(store, described, stale), Measuring(store, cells, answers.reach)
    del described

    def all_rows() -> Iterator[pa.Table]:
        reach = {cell.cell: answers.reach[cell.cell] for cell in cells if cell.cell in stale}
        scorer = Grader(spec, reach, answers.of, judge, answers.failed)
        for block in answers.blocks(cells):
            yield from rows_of(block, scorer.scores([cell.cell for cell in block if cell.cell in stale]))

    def rows_of(block: Sequence[Cell], scores: Iterator[tuple[str, CellScores]]) -> Iterator[pa.Table]:
        """Yield the `samples` rows of a block. A function of its own, so that its variables are freed before the next block is
        read.
        """
        for part, rows in answers.parts(block):
            scored.begin(part)
            scored.answers |= {name: digest for name, digest in digests_of_cells(rows).items() if name in stale}
            for cell in part:
                if cell.cell in stale:
                    name, found = next(scores)
                    assert name == cell.cell, "scores come in the order of the cells"
                    scored.add(cell, found)
                    after()
            for measures in measuring.of(rows, part[0].dataset):
                scored.rows.add_table(measures)
            yield scored.rows.table()

    scored.scorer = scorer_digest(spec)
    with opened() as heard:
        scored.files = lambda: scorer_files(spec, heard, store.root)
        store.write_scores(all_rows(), scored.metrics, beside=[cell.cell for cell in cells if cell.base == "full"])
    release()
    return len(stale)


class _Scored:
    """The rows of a dataset's cells during scoring, unchanged and new, for a few cells at a time.

    rows: rows of the current cells.
    aggregates, judges: (cell, metric) to lmms-eval's aggregate, and to the columns about the judge.
    reasons: cell, or (cell, metric), to the reason why there is no aggregate.
    answers: cell to the digest of the scored answers.
    scorer: digest of the scorer's code.
    files: a function that returns the files that the scorer has opened so far.
    """

    def __init__(self, store: Store, cells: pa.Table, stale: set[str]) -> None:
        self._store, self._stale = store, stale
        self._described = cells.to_pandas()
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
                self._keep(row)

    def begin(self, cells: Sequence[Cell]) -> None:
        """Make these cells the current ones: drop the rows of the previous cells and read the stored rows of these."""
        names = [cell.cell for cell in cells]
        self.rows = SampleRows()
        self._stored = ByCell(self._store.samples([name for name in names if name in self._stale]))
        self.rows.add_table(self._store.samples([name for name in names if name not in self._stale]), without=NAMES)

    def _keep(self, row: Mapping[str, Any]) -> None:
        key = row["cell"], row["metric"]
        self.aggregates |= {key: row["lmms_eval"]} if row["lmms_eval"] is not None else {}
        self.reasons |= {key: row["lmms_eval_reason"]} if row["lmms_eval_reason"] is not None else {}
        self.judges[key] = {name: row[name] for name in JUDGE}
        self._evidence[row["cell"]] = {name: row[name] for name in EVIDENCE}

    def add(self, cell: Cell, scores: CellScores) -> None:
        """Add the scores of a pass. An earlier judge's scores stay if the pass has none."""
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
        rows = {(row["sample_id"], row["metric"]): row for row in fresh.table().to_pylist()}
        stored = self._stored.of(name).drop_columns(["schema_version"]).to_pylist()
        for known in self._metrics.get(name, []):
            if known["judge"] is not None:
                self._keep_judged(known, [row for row in stored if row["metric"] == known["metric"]], rows, scores)
        self.rows.add_rows(list(rows.values()))

    def _keep_judged(
        self, known: Row, stored: Sequence[Row], rows: dict[tuple[str, str], Row], scores: CellScores
    ) -> None:
        """Merge stored scores of a judged metric into the rows of a new pass that would lose some of them.

        Such a metric keeps every stored score whose sample has none in this pass (a stored `ok` answer never changes). If this
        pass had another judge than the stored one, the metric keeps all its stored scores, and samples without a score stay
        unjudged: scores of two judges are never averaged. The new judge's answers are in its cache, so a later pass only has to
        ask for the rest.

        known, stored: the metric's stored row of the table `metrics`, and its stored rows of `samples`.
        rows: (sample, metric) to the rows of this pass; changed in place.
        scores: the result of this pass.
        """
        name, metric = known["cell"], known["metric"]
        judged = {row["sample_id"]: row for row in stored if row["status"] == "ok" and row["value"] is not None}
        lost = [sample for sample in judged if rows.get((sample, metric), _NO_SCORE)["value"] is None]
        if not lost:
            return
        by = scores.judged.get(metric)
        other = by is not None and tuple(by) != tuple(known[column] for column in JUDGE)
        rows |= {(sample, metric): judged[sample] for sample in (judged if other else lost)}
        new = {sample: row for (sample, its), row in rows.items() if its == metric}
        if other:
            new |= {sample: row | {"value": None} for sample, row in new.items() if sample not in judged}
            rows |= {(sample, metric): row for sample, row in new.items()}
        answered = [row for row in new.values() if row["status"] == "ok"]
        waiting = sum(row["value"] is None for row in answered)
        same = new.keys() == {row["sample_id"] for row in stored} and not waiting
        self.judges[name, metric] = {column: known[column] for column in JUDGE}
        self.aggregates[name, metric] = known["lmms_eval"] if same else None
        if waiting:
            why = scores.not_judged.get(metric, "").split(": ", 2)[-1] or "this judge did not answer for all"
            self.reasons[name, metric] = f"{NOT_JUDGED}: {waiting} of {len(answered)} samples: {why}"
        else:
            together = f"{NOT_JUDGED} in one pass, which lmms-eval's aggregate needs"
            self.reasons[name, metric] = known["lmms_eval_reason"] if same else scores.reason or together

    def metrics(self, samples: pa.Table) -> pa.Table:
        """Return the rows of the table `metrics` computed from these `samples` rows. Each metric of a cell must be complete."""
        own = self._described[self._described["cell"].isin(samples["cell"].unique().to_pylist())]
        found = metrics_rows(frame(samples), own, lmms_eval=self.aggregates, reasons=self.reasons, judges=self.judges)
        pa.default_memory_pool().release_unused()
        files = json.dumps(dict(self.files()), sort_keys=True)
        new = {"scorer_digest": self.scorer, "scorer_files": None if files == "{}" else files}
        nothing = dict.fromkeys(EVIDENCE)
        for row in found:
            digest = self.answers.get(row["cell"])
            row |= self._evidence.get(row["cell"], nothing) if digest is None else {**new, "answers_digest": digest}
        of_store = ("schema_version", "row_digest")  # which the store adds
        return pa.Table.from_pylist(found, pa.schema([field for field in METRICS if field.name not in of_store]))

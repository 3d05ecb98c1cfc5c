"""The score stage: stored answers through lmms-eval's own metric code, cell by cell; no model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmkv_bench.planning.judging import not_judged

if TYPE_CHECKING:
    from mmkv_bench.evaluation.contract import SampleScore, TaskSpec
    from mmkv_bench.evaluation.judging.desk import Desk
    from mmkv_bench.planning.cells import Cell
    from mmkv_bench.store.store import Store

_ANSWER_COLUMNS = ("cell", "sample_id", "answer", "status", "doc_id", "prompt_hash")


def unscored(store: Store, cells: Sequence[Cell], judge: Desk | None = None) -> list[str]:
    """Cells whose stored answers are not the ones that were scored: new samples, never scored, or for the judge to do."""
    names = [cell.cell for cell in cells]
    answered = _statuses(store.responses(names, ("cell", "sample_id", "status")))
    scored = _statuses(store.samples(names).select(["cell", "sample_id", "status"]))
    metrics = store.metrics(names).to_pylist()
    with_metrics = {row["cell"] for row in metrics}
    to_judge = {row["cell"] for row in metrics if judge is not None and _to_judge(row, judge)}
    return [
        name
        for name in names
        if answered.get(name) and (answered[name] != scored.get(name) or name not in with_metrics or name in to_judge)
    ]


def _to_judge(row: Mapping[str, Any], judge: Desk) -> bool:
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
    judge: Desk | None = None,
) -> int:
    """Score what is not scored yet, then the metrics of all cells of the dataset (differences need `full`).

    Args:
        spec: the task; cells: this run's cells of it; after: told about each scored cell; judge: where the questions of
            scorers go, None = nowhere. What an earlier judge gave stands where this one gives nothing (kept_scores.py).

    Returns:
        How many cells were scored anew; 0 leaves the store untouched.

    Raises:
        ScoringError: lmms-eval's metric code failed; the answers stay as they are.
    """
    from mmkv_bench.evaluation import release, score
    from mmkv_bench.planning.kept_scores import keep_judged
    from mmkv_bench.tables.metrics import JUDGE, metrics_rows

    stale = set(unscored(store, cells, judge))
    if not stale:
        return 0
    samples: dict[str, list[dict[str, Any]]] = {}
    aggregates, reasons, judges = {}, {}, {}
    for row in store.metrics([cell.cell for cell in cells if cell.cell not in stale]).to_pylist():
        key = row["cell"], row["metric"]
        aggregates |= {key: row["lmms_eval"]} if row["lmms_eval"] is not None else {}
        reasons |= {key: row["lmms_eval_reason"]} if row["lmms_eval_reason"] is not None else {}
        judges[key] = {name: row[name] for name in JUDGE}
    for cell in cells:
        stored = store.samples([cell.cell]).drop_columns(["schema_version"]).to_pylist()
        if cell.cell not in stale:
            if stored:
                samples[cell.cell] = stored
            continue
        answers = _answers(store, cell)
        scores = score(spec, answers, 1 + max(answer.doc_id for answer in answers.values()), judge)
        kept = keep_judged(_rows(cell, scores.samples), stored, store.metrics([cell.cell]).to_pylist(), scores)
        samples[cell.cell] = kept.samples
        for metric, value in (scores.aggregate or {}).items():
            aggregates[cell.cell, metric] = value
        if scores.reason is not None:
            reasons[cell.cell] = scores.reason
        reasons |= {(cell.cell, metric): why for metric, why in (scores.unaggregated | scores.not_judged).items()}
        judges |= {(cell.cell, metric): dict(zip(JUDGE, by, strict=True)) for metric, by in scores.judged.items()}
        judges |= {(cell.cell, metric): by for metric, by in kept.judges.items()}
        aggregates |= {(cell.cell, metric): value for metric, value in kept.lmms_eval.items()}
        reasons |= {(cell.cell, metric): why for metric, why in kept.reasons.items()}
        after(cell)
    release()
    import pandas as pd

    _add_measures(store, cells, samples)
    names = list(samples)
    metrics = metrics_rows(
        pd.DataFrame([row for rows in samples.values() for row in rows]),
        store.cells(names).to_pandas(),
        lmms_eval=aggregates,
        reasons=reasons,
        judges=judges,
    )
    for name in names:
        store.write_scores(name, samples[name], [row for row in metrics if row["cell"] == name])
    return len(stale)


def _statuses(rows: Any) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for row in rows.to_pylist():
        found.setdefault(row["cell"], {})[row["sample_id"]] = row["status"]
    return found


def _answers(store: Store, cell: Cell) -> dict[str, Any]:
    from mmkv_bench.evaluation import Answer

    rows = store.responses([cell.cell], _ANSWER_COLUMNS).to_pylist()
    return {
        row["sample_id"]: Answer(row["answer"], row["status"], row["doc_id"], row["prompt_hash"])
        for row in sorted(rows, key=lambda row: row["doc_id"])
    }


def _add_measures(store: Store, cells: Sequence[Cell], samples: dict[str, list[dict[str, Any]]]) -> None:
    """Put the measures of stored rows beside the task's scores, of every cell anew: they need the rows of `full`, which
    may have come later than a cell's."""
    from mmkv_bench.evaluation.measures import COLUMNS, NAMES, measured, stored

    answered = store.responses(list(samples), COLUMNS)  # sorted by cell
    rows, start = {}, 0
    for name, group in groupby(answered["cell"].to_pylist()):
        count = len(list(group))
        rows[name] = answered.slice(start, count)
        start += count
    slim = {name for name, of_cell in rows.items() if any(of_cell["slim"].to_pylist())}
    before: dict[str, list[dict[str, Any]]] = {name: [] for name in slim}
    for row in store.samples(slim).to_pylist() if slim else ():
        before[row["cell"]].append(row)
    full = {
        cell.protocol: {row["sample_id"]: row for row in rows[cell.cell].to_pylist()}
        for cell in cells
        if cell.base == "full" and cell.cell in rows
    }
    for cell in (cell for cell in cells if cell.cell in samples and cell.cell in rows):
        of_full = full.get(cell.protocol, {})
        known = stored(before.get(cell.cell, ()))
        found = measured(rows[cell.cell].to_pylist(), of_full, cell.protocol, cell.base == "full", known)
        scored = [row for row in samples[cell.cell] if row["metric"] not in NAMES]
        samples[cell.cell] = scored + _rows(cell, found)


def _rows(cell: Cell, scores: Sequence[SampleScore]) -> list[dict[str, Any]]:
    return [
        {
            "cell": cell.cell,
            "dataset": cell.dataset,
            "sample_id": sample.sample_id,
            "cluster": sample.cluster,
            "metric": sample.metric,
            "value": sample.value,
            "status": sample.status,
            "parts": sample.parts,
        }
        for sample in scores
        if sample.status != "missing"  # not generated yet (another shard, an interrupted run): no row to score
    ]

"""The `metrics` rows: one per stored setting ("cell") and metric, computed from scores by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.intervals import NO_INTERVAL, intervals
from mmkv_bench.statistics.metric_kinds import Pooled, aggregate_of, is_share, lower_is_better
from mmkv_bench.tables.compare import Difference, against
from mmkv_bench.tables.sample_scores import Scores, Sheet
from mmkv_bench.tables.stored_rows import BASELINE, check, context_key, with_limits

if TYPE_CHECKING:
    import pandas as pd


JUDGE = ("judge", "judge_prompts", "judge_temperature")


def metrics_rows(
    samples: pd.DataFrame,
    cells: pd.DataFrame,
    *,
    lmms_eval: Mapping[tuple[str, str], float | None] | None = None,
    reasons: Mapping[str | tuple[str, str], str | None] | None = None,
    judges: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return one `metrics` row per cell and metric of `samples`, in the order of `cells`, then of metric names.

    The column `difference` is the cell's score minus the score of `full` in the same context (model, dataset, protocol), over the
    samples that are ok in both. It is null for `full` itself, and if `full` is not among `cells`.

    Args:
        samples, cells: frames of the store's tables of these names.
        lmms_eval: (cell, metric) -> lmms-eval's own aggregate.
        reasons: cell, or (cell, metric) -> why lmms-eval gives no aggregate.
        judges: (cell, metric) -> the columns of `JUDGE`.

    Raises:
        StoreError: rows contradict each other, such as two `full` cells of one context.
    """
    lmms_eval, reasons, judges = lmms_eval or {}, reasons or {}, judges or {}
    check(cells, samples)
    cells = with_limits(cells)
    sheet = Sheet.of(samples, list(cells["cell"]))
    scores = {(sheet.cells[cell], metric): sheet.scores([cell], metric) for cell, metric, _ in sheet.slices()}
    metrics_of: dict[str, list[str]] = {}
    for cell, metric in scores:
        metrics_of.setdefault(cell, []).append(metric)
    cell_records = cells.to_dict("records")
    differences = _differences(cell_records, scores)
    dataset_of = {row["cell"]: row["dataset"] for row in cell_records}
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}  # all cells of a dataset and metric at once
    for cell, metric in scores:
        groups.setdefault((dataset_of[cell], metric), []).append((cell, metric))
    headline_of: dict[tuple[str, str], dict[str, Any]] = {}
    for (dataset, metric), keys in groups.items():
        headline_of |= dict(zip(keys, headlines([scores[key] for key in keys], dataset, metric), strict=True))
    rows = []
    for key in [(cell, metric) for cell in dataset_of for metric in metrics_of.get(cell, ())]:
        difference, aggregate = differences.get(key, Difference(0, None, None, None)), lmms_eval.get(key)
        rows.append(
            {
                "cell": key[0],
                "dataset": dataset_of[key[0]],
                "metric": key[1],
                **headline_of[key],
                "difference": difference.value,
                "difference_low": difference.low,
                "difference_high": difference.high,
                "lmms_eval": aggregate,
                "lmms_eval_reason": None if aggregate is not None else reasons.get(key, reasons.get(key[0])),
                **dict.fromkeys(JUDGE),
                **judges.get(key, {}),
            }
        )
    return rows


def headlines(scores: Sequence[Scores], dataset: str, metric: str) -> list[dict[str, Any]]:
    """Return one dict per item of `scores`, with these keys.

    n, n_ok: numbers of samples and of ok samples.
    value, low, high, interval: score, ends of its interval and kind of the interval; None unless every sample is ok.
    value_failures_zero: score with failed samples counted as 0. If a sample failed, it is None where smaller values are better
        (0 would flatter a failure), an answer was not judged, or a pooled metric lacks the parts of a failed sample.
    """
    aggregator = aggregate_of(metric)
    for cell in scores:
        # Only failed samples may lack parts.
        if aggregator and cell.n_ok and (cell.parts is None or np.isnan(cell.parts[cell.ok]).any()):
            raise StoreError(
                f"{dataset}: rows of {metric} lack the parts from which it is aggregated; score the answers again with "
                "stage=score"
            )
    complete_scores = [(_aggregated(cell, aggregator), cell.clusters) for cell in scores if cell.complete]
    interval_iterator = iter(intervals(complete_scores, dataset, aggregator, is_share(metric)))
    rows = []
    for cell in scores:
        interval = next(interval_iterator) if cell.complete else NO_INTERVAL
        value = aggregate(cell, aggregator) if cell.complete else None
        row: dict[str, Any] = {"n": cell.n, "n_ok": cell.n_ok, "value": value}
        row["value_failures_zero"] = value if cell.complete else _with_failures(cell, aggregator, metric)
        rows.append(row | {"low": interval.low, "high": interval.high, "interval": interval.kind})
    return rows


def aggregate(scores: Scores, aggregator: Pooled | None = None) -> float:
    """Return the mean over all samples, or the pooled value of `aggregator`."""
    if aggregator is None:
        return float(np.mean(scores.values))
    return aggregator(_aggregated(scores, aggregator))


def _aggregated(scores: Scores, aggregator: Pooled | None) -> np.ndarray:
    if aggregator is None:
        return scores.values
    assert scores.parts is not None, "the caller checks that there are parts"
    return scores.parts


def _with_failures(scores: Scores, aggregator: Pooled | None, metric: str) -> float | None:
    """Return `value_failures_zero` of `headlines` for scores with a failed sample.

    A pooled metric needs no change: a failed sample already has the parts of an empty answer.
    """
    parts_known = aggregator is None or (scores.parts is not None and not np.isnan(scores.parts).any())
    if not scores.n or not parts_known or scores.unjudged or lower_is_better(metric):
        return None
    return aggregate(replace(scores, values=np.nan_to_num(scores.values, nan=0.0)), aggregator)


def _differences(
    cells: Sequence[Mapping[str, Any]], scores: Mapping[tuple[str, str], Scores]
) -> dict[tuple[str, str], Difference]:
    """Return (cell, metric) -> score minus the score of `full` in the same context. cells: rows of the table `cells`."""
    full_of: dict[tuple[str, ...], str] = {}
    for row in cells:
        if row["base"] == BASELINE and full_of.setdefault(context_key(row), row["cell"]) != row["cell"]:
            earlier_cell = full_of[context_key(row)]
            raise StoreError(
                f"Cells {earlier_cell} and {row['cell']} are both `full` of the same context; keep only one of them."
            )
    full_cell_of = {cell["cell"]: full_of.get(context_key(cell)) for cell in cells}
    groups: dict[tuple[str, str], list[str]] = {}
    for cell, metric in scores:
        baseline = full_cell_of[cell]
        if baseline is not None and baseline != cell and (baseline, metric) in scores:
            groups.setdefault((baseline, metric), []).append(cell)
    differences: dict[tuple[str, str], Difference] = {}
    for (baseline, metric), names in groups.items():
        values = against([scores[cell, metric] for cell in names], scores[baseline, metric], metric)
        differences |= {(cell, metric): value for cell, value in zip(names, values, strict=True)}
    return differences

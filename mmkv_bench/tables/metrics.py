"""The `metrics` rows of cells: one per cell and metric, computed from per-sample scores. A pure function of frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.errors import StoreError
from mmkv_bench.tables.compare import Difference, against
from mmkv_bench.tables.intervals import NO_INTERVAL, Aggregator, interval
from mmkv_bench.tables.known import Pooled, aggregate_of, is_share, lower_is_better
from mmkv_bench.tables.rows import BASELINE, check, context_key, with_limits
from mmkv_bench.tables.scores import Scores, Sheet

if TYPE_CHECKING:
    import pandas as pd


JUDGE = ("judge", "judge_prompts", "judge_temperature")


def metrics_rows(
    samples: pd.DataFrame,
    cells: pd.DataFrame,
    *,
    aggregators: Mapping[str, Aggregator] | None = None,
    lmms_eval: Mapping[tuple[str, str], float] | None = None,
    reasons: Mapping[str | tuple[str, str], str] | None = None,
    judges: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """One `metrics` row per cell and metric of `samples`, in the order of `cells`, then of metric names.

    The difference is the cell's score minus that of the `full` cell of the same context and protocol, over the samples
    ok in both; it is null where there is no such cell, and for `full` itself. So `samples` and `cells` must hold the
    `full` cells beside those that are wanted.

    samples, cells: frames of the tables of those names. aggregators: metric -> aggregate where it is not the one known by
    the metric's name (`known.aggregate_of`).
    lmms_eval, judges: (cell, metric) -> lmms-eval's own aggregate, the judge's columns. reasons: cell, or cell and
    metric, -> why lmms-eval gives no aggregate.

    Raises StoreError for rows that contradict each other, such as two `full` cells of one context.
    """
    lmms_eval, reasons, judges = (given or {} for given in (lmms_eval, reasons, judges))
    check(cells, samples)
    cells = with_limits(cells)
    sheet = Sheet.of(samples, list(cells["cell"]))
    scores = {(sheet.cells[cell], metric): sheet.scores([cell], metric) for cell, metric, _ in sheet.every()}
    full_of: dict[tuple[str, ...], str] = {}
    for _, row in cells[cells["base"] == BASELINE].iterrows():
        other = full_of.setdefault(context_key(row), row["cell"])
        if other != row["cell"]:
            raise StoreError(f"Cells {other} and {row['cell']} are both `full` of the same context: one must go.")
    differences = _differences(cells, scores, full_of, aggregators)
    rows = []
    for _, cell in cells.iterrows():
        for name, metric in sorted(key for key in scores if key[0] == cell["cell"]):
            row = {"cell": name, "dataset": cell["dataset"], "metric": metric}
            aggregator = aggregator_of(metric, aggregators)
            row |= headline(scores[name, metric], cell["dataset"], aggregator, metric)
            difference = differences.get((name, metric), _NO_DIFFERENCE)
            row |= {
                "difference": difference.value,
                "difference_low": difference.low,
                "difference_high": difference.high,
            }
            aggregate = lmms_eval.get((name, metric))
            row["lmms_eval"] = aggregate
            reason = reasons.get((name, metric), reasons.get(name))
            row["lmms_eval_reason"] = None if aggregate is not None else reason
            row |= dict.fromkeys(JUDGE) | dict(judges.get((name, metric), {}))
            rows.append(row)
    return rows


def headlines(
    scores: Sequence[Scores], dataset: str, aggregator: Aggregator | None = None, metric: str = ""
) -> list[dict[str, Any]]:
    """`headline` of each of a table's cells."""
    return [headline(own, dataset, aggregator, metric) for own in scores]


def headline(scores: Scores, dataset: str, aggregator: Aggregator | None = None, metric: str = "") -> dict[str, Any]:
    """n, n_ok, value and interval (null unless every sample is ok), and the score with failures counted as 0.

    Where less is better, 0 would flatter a failure, and nothing is counted in its place; nor is an answer 0 that no judge
    has judged, nor a failure of which the metric's parts are not known.
    """
    _require_parts(scores, dataset, aggregator)
    pooled = isinstance(aggregator, Pooled)
    measured = scores.parts if pooled else scores.values
    countable = not pooled or (scores.parts is not None and not np.isnan(scores.parts).any())
    found = NO_INTERVAL
    if scores.complete:
        found = interval(measured, scores.clusters, dataset, aggregator=aggregator, share=is_share(metric))
    return {
        "n": scores.n,
        "n_ok": scores.n_ok,
        "value": aggregate(scores, aggregator) if scores.complete else None,
        "value_failures_zero": (
            aggregate(_failures_zero(scores), aggregator)
            if scores.complete or (scores.n and countable and not scores.unjudged and not lower_is_better(metric))
            else None
        ),
        "low": found.low,
        "high": found.high,
        "interval": found.kind,
    }


def aggregator_of(metric: str, given: Mapping[str, Aggregator] | None = None) -> Aggregator | None:
    """The aggregate of a metric: the given one, else the one known by its name; None = the mean."""
    return (given or {}).get(metric) or aggregate_of(metric)


def aggregate(scores: Scores, aggregator: Aggregator | None = None) -> float:
    """The score of a set of samples: their mean unless the metric has an aggregate of its own."""
    if aggregator is None:
        return float(np.mean(scores.values))
    return float(aggregator(scores.parts if isinstance(aggregator, Pooled) else scores.values))


def _failures_zero(scores: Scores) -> Scores:
    """The same with failed samples as 0; their parts are those of an empty answer already."""
    return replace(scores, values=np.nan_to_num(scores.values, nan=0.0))


def _require_parts(scores: Scores, dataset: str, aggregator: Aggregator | None) -> None:
    """Samples that are ok need parts; failed ones may lack them, as when no sample of a cell reached the scorer."""
    if not isinstance(aggregator, Pooled) or not scores.n_ok:
        return
    if scores.parts is None or np.isnan(scores.parts[scores.ok]).any():
        raise StoreError(
            f"{dataset}: a metric that is no mean over samples has rows without the parts it is aggregated from; score the "
            "answers again with stage=score"
        )


def _differences(
    cells: pd.DataFrame,
    scores: Mapping[tuple[str, str], Scores],
    full_of: Mapping[tuple[str, ...], str],
    aggregators: Mapping[str, Aggregator] | None,
) -> dict[tuple[str, str], Difference]:
    """(cell, metric) -> the cell minus `full` of its context; all cells that have the same `full` at once."""
    full = dict(zip(cells["cell"], (full_of.get(context_key(cell)) for _, cell in cells.iterrows()), strict=True))
    groups: dict[tuple[str, str], list[str]] = {}
    for cell, metric in scores:
        if full[cell] not in (None, cell) and (full[cell], metric) in scores:
            groups.setdefault((full[cell], metric), []).append(cell)
    found = {}
    for (baseline, metric), own in groups.items():
        aggregator = aggregator_of(metric, aggregators)
        values = against([scores[cell, metric] for cell in own], scores[baseline, metric], metric, aggregator)
        found |= {(cell, metric): value for cell, value in zip(own, values, strict=True)}
    return found


_NO_DIFFERENCE = Difference(0, None, None, None)

"""Rows for an experiment tracker, such as Weights & Biases. The keys of a row never change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmkv_bench.statistics.metric_kinds import MEASURES, PARSE_FAILED
from mmkv_bench.store.schema import IDENTITY
from mmkv_bench.store.store import Store
from mmkv_bench.tables.cost_rows import KNOWN, answer_costs, pass_costs
from mmkv_bench.tables.stored_rows import config_of, dataset_node, latest, missing, with_limits

if TYPE_CHECKING:
    import pandas as pd

_NOT_HEADLINE_METRICS = {*MEASURES, PARSE_FAILED}
COSTS = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "peak_bytes": "peak_total"}
"""Key of a row -> cost of a method."""
GROUP_COSTS = {"group_prefill_s": "prefill_s", "group_decode_s": "decode_s", "group_peak_bytes": "peak_total"}
"""Key of a row -> cost of all methods that shared a prefill."""


def tracked_rows(store: Store) -> list[dict[str, Any]]:
    """Return one row per stored setting ("cell") and headline metric. `scenario=efficiency` gives a row per prompt shape instead.

    Only the latest version of a method has rows. The keys of a row:

    cell, ...: identity of the cell; `budget` is a number of entries or a fraction.
    prompt_tokens, batch: prompt shape of timed passes; null for answers.
    metric, score, low, high, difference: metric, score, ends of its interval, and score minus that of `full`; null for passes.
    answers, failures: numbers of answers (or passes) and of failed ones.
    ttft_s, tpot_s, peak_bytes: medians [s] and largest peak [bytes] of answers with a prefill of their own, or of passes.
    group_prefill_s, group_decode_s, group_peak_bytes: medians [s] and largest peak [bytes] of answers whose methods shared a
        prefill. All six are null if unknown.
    """
    cells = store.cells().to_pandas()
    if cells.empty:
        return []
    cells = cells[latest(with_limits(cells))]
    names = list(cells["cell"])
    costs = [KNOWN[name] for name in dict.fromkeys([*COSTS.values(), *GROUP_COSTS.values()])]
    answers, passes = (read(store, names, costs) for read in (answer_costs, pass_costs))
    by_cell, by_shape = dict(list(answers.frame.groupby("place"))), dict(list(passes.frame.groupby(["place", "shape"])))
    scores: dict[str, list[dict[str, Any]]] = {}
    for row in store.metrics(names).to_pylist():
        scores.setdefault(row["cell"], []).append(row)
    tracked = []
    for place, row in enumerate(cells.to_dict("records")):
        identity = {"cell": row["cell"]}
        for name in (*IDENTITY, "device"):
            value: Any = None if missing(row[name]) else row[name]
            identity[name] = value.item() if hasattr(value, "item") else value
        budget = row["budget_entries"] if row["budget_kind"] == "entries" else row["budget_fraction"]
        identity["budget"] = None if missing(budget) else float(budget)
        if place in by_cell:
            totals = _totals(by_cell[place])
            shape_fields: dict[str, Any] = {"prompt_tokens": None, "batch": None}
            tracked += [identity | shape_fields | score | totals for score in _scores(row, scores.get(row["cell"], []))]
        for number, prompt in enumerate(passes.shapes):
            if (place, number) in by_shape:
                shape_fields = {name: prompt[name] for name in ("prompt_tokens", "batch")}
                tracked.append(identity | shape_fields | _NO_SCORE | _totals(by_shape[place, number]))
    return tracked


_NO_SCORE: dict[str, Any] = dict.fromkeys(("metric", "score", "low", "high", "difference"))


def _scores(cell: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one dict with the keys of `_NO_SCORE` per headline metric; one dict of nulls without scores or with random weights.

    Headline metrics are those in the dataset's configuration, or else all but `_NOT_HEADLINE_METRICS`.

    cell: row of `cells`. rows: the cell's `metrics` rows.
    """
    if cell.get("weights") == "random":
        return [_NO_SCORE]
    headline_metrics = dataset_node(config_of(cell["config"]), cell["dataset"]).get("metrics")
    shown_rows = [
        row
        for row in rows
        if (row["metric"] in headline_metrics if headline_metrics else row["metric"] not in _NOT_HEADLINE_METRICS)
    ]
    return [{name: row["value" if name == "score" else name] for name in _NO_SCORE} for row in shown_rows] or [
        _NO_SCORE
    ]


def _totals(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the keys `answers` and `failures`, and those of `COSTS` and `GROUP_COSTS`. rows: costs of one setting."""
    totals: dict[str, Any] = {"answers": len(rows), "failures": int((rows["status"] > 0).sum())}
    for names, shared in ((COSTS, False), (GROUP_COSTS, True)):
        shared_or_single_rows = rows[rows["group"] == shared]
        for key, name in names.items():
            values = shared_or_single_rows[name].dropna()
            total = values.max() if key.endswith("peak_bytes") else values.median()
            totals[key] = float(total) if len(values) else None
    return totals

"""Rows for an experiment tracker: identity and results, one row per cell and headline metric, under keys that never change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmkv_bench.statistics.metric_kinds import MEASURES, PARSE_FAILED
from mmkv_bench.store.schema import IDENTITY
from mmkv_bench.store.store import Store
from mmkv_bench.tables.cost_rows import KNOWN, answer_costs, pass_costs
from mmkv_bench.tables.rows import config_of, dataset_node, latest, missing, with_limits

if TYPE_CHECKING:
    import pandas as pd

_BESIDE = {*MEASURES, PARSE_FAILED}
COSTS = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "peak_bytes": "peak_total"}
"""Key of a row -> name of its cost."""
GROUP_COSTS = {"group_prefill_s": "prefill_s", "group_decode_s": "decode_s", "group_peak_bytes": "peak_total"}
"""Key of a row -> name of its cost, in runs that shared prefills: these times and peaks belong to a group."""


def tracked_rows(store: Store) -> list[dict[str, Any]]:
    """Return the rows in the order of the cells; only the latest version of a method has rows.

    A row has the cell's identity (`budget` as a number, entries or a fraction), `score` with its interval and `difference`
    to full, `answers` and `failures`. It has medians of `ttft_s` and `tpot_s` [s] and the largest `peak_bytes` if the cell
    ran by itself, otherwise null. `group_prefill_s` and `group_decode_s` [s] are medians, and `group_peak_bytes` is the largest,
    of the shared runs of the cell. Cells of scenario=efficiency have a row per length and batch, without a score.
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
    """Return one record per headline metric of the cell: the metrics in its dataset's configuration, or else all metrics that are
    not measures. Return one record of nulls if there is no score.

    rows: the cell's `metrics` rows."""
    if cell.get("weights") == "random":
        return [_NO_SCORE]
    headline_metrics = dataset_node(config_of(cell["config"]), cell["dataset"]).get("metrics")
    shown_rows = [
        row for row in rows if (row["metric"] in headline_metrics if headline_metrics else row["metric"] not in _BESIDE)
    ]
    return [{name: row["value" if name == "score" else name] for name in _NO_SCORE} for row in shown_rows] or [
        _NO_SCORE
    ]


def _totals(rows: pd.DataFrame) -> dict[str, Any]:
    """Return counts, medians, and the largest peak; values of shared runs have separate keys (`GROUP_COSTS`)."""
    totals: dict[str, Any] = {"answers": len(rows), "failures": int((rows["status"] > 0).sum())}
    for names, shared in ((COSTS, False), (GROUP_COSTS, True)):
        shared_or_single_rows = rows[rows["group"] == shared]
        for key, name in names.items():
            values = shared_or_single_rows[name].dropna()
            total = values.max() if key.endswith("peak_bytes") else values.median()
            totals[key] = float(total) if len(values) else None
    return totals

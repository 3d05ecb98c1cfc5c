"""Rows of a store for a viewer: what each cell is and what it came to, a line per cell and headline metric, keys that stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.statistics.metric_kinds import MEASURES, PARSE_FAILED
from mmkv_bench.tables.cost_names import KNOWN
from mmkv_bench.tables.cost_rows import Seen, answers_seen, passes_seen
from mmkv_bench.tables.rows import config_of, latest, missing, with_limits

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store

COSTS = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "peak_bytes": "peak_total"}
"""Key of a line -> the cost that it holds (`cost_names`)."""
GROUP_COSTS = {"group_prefill_s": "prefill_s", "group_decode_s": "decode_s", "group_peak_bytes": "peak_total"}
"""The same of runs that shared prefills, whose times and peak are a group's."""
_IS = (
    "model",
    "dataset",
    "method",
    "base",
    "reading",
    "protocol",
    "budget_kind",
    "seed",
    "dtype",
    "attention",
    "device",
)


def viewed(store: Store) -> list[dict[str, Any]]:
    """Lines in the order of the cells, those of later versions of a method alone.

    A line has the cell's identity (`budget` as a number, entries or a fraction), `score` with its interval and `difference`
    to full, `answers` and `failures`, and medians of `ttft_s` and `tpot_s` [s] and the largest `peak_bytes` where the cell
    ran by itself, null elsewhere. `group_prefill_s` and `group_decode_s` [s] are medians and `group_peak_bytes` the largest of
    the shared runs that the cell was in. Cells of scenario=efficiency have a line per length and batch, without a score.
    """
    cells = store.cells().to_pandas()
    if cells.empty:
        return []
    cells = cells[latest(with_limits(cells))]
    names = list(cells["cell"])
    costs = [KNOWN[name] for name in dict.fromkeys([*COSTS.values(), *GROUP_COSTS.values()])]
    answers, passes = answers_seen(store, names, costs), passes_seen(store, names, costs)
    scores: dict[str, list[dict[str, Any]]] = {}
    for row in store.metrics(names).to_pylist():
        scores.setdefault(row["cell"], []).append(row)
    lines = []
    for place, row in enumerate(cells.to_dict("records")):
        is_what = {"cell": row["cell"], **{name: _told(row[name]) for name in _IS}, "budget": _budget(row)}
        own = answers.lines([place])
        if len(own):
            came_to = {"answers": len(own), "failures": int((answers.status[own] > 0).sum()), **_costs(answers, own)}
            shape: dict[str, Any] = {"prompt_tokens": None, "batch": None}
            lines += [is_what | shape | score | came_to for score in _scores(row, scores.get(row["cell"], []))]
        timed = passes.lines([place])
        for number in np.unique(passes.shape[timed]).tolist():
            own = timed[passes.shape[timed] == number]
            shape = {name: passes.shapes[number][name] for name in ("prompt_tokens", "batch")}
            came_to = {"answers": len(own), "failures": int((passes.status[own] > 0).sum()), **_costs(passes, own)}
            lines.append(is_what | shape | _NO_SCORE | came_to)
    return lines


_NO_SCORE: dict[str, Any] = dict.fromkeys(("metric", "score", "low", "high", "difference"))


def _scores(cell: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cell's headlines: the metrics that its dataset's configuration names, else all but measures; one empty line without
    any."""
    if cell.get("weights") == "random":
        return [_NO_SCORE]
    node = (config_of(cell["config"]).get("datasets") or {}).get(cell["dataset"]) or {}
    wanted = list(node.get("metrics") or [])
    shown = [
        row for row in rows if (row["metric"] in wanted if wanted else row["metric"] not in {*MEASURES, PARSE_FAILED})
    ]
    return [
        {
            "metric": row["metric"],
            "score": row["value"],
            "low": row["low"],
            "high": row["high"],
            "difference": row["difference"],
        }
        for row in shown
    ] or [_NO_SCORE]


def _costs(seen: Seen, lines: np.ndarray) -> dict[str, float | None]:
    """Medians, and the largest peak, of these lines; those of shared runs stand under names of their own."""
    found: dict[str, float | None] = {}
    for names, shared in ((COSTS, False), (GROUP_COSTS, True)):
        ours = lines[seen.group[lines] == shared]
        for key, name in names.items():
            values = seen.values[name][ours]
            known = values[~np.isnan(values)]
            reduce = np.max if key.endswith("peak_bytes") else np.median
            found[key] = float(reduce(known)) if len(known) else None
    return found


def _budget(row: Mapping[str, Any]) -> float | None:
    given = row["budget_entries"] if row["budget_kind"] == "entries" else row["budget_fraction"]
    return None if missing(given) else float(given)


def _told(value: Any) -> Any:
    return None if missing(value) else value.item() if hasattr(value, "item") else value

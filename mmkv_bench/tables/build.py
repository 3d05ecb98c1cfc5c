"""Tables of scores from rows: one per context, metric and kind of budget, with seeds averaged and methods compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.metric_kinds import FIDELITY, PARSE_FAILED, aggregate_of, upstream
from mmkv_bench.tables.audit import Audits, free_share
from mmkv_bench.tables.comparable_cells import SeedGroup, Sweep, find, sweeps, verdict
from mmkv_bench.tables.compare import columns
from mmkv_bench.tables.metric_rows import aggregate, headlines
from mmkv_bench.tables.sample_scores import Scores, Sheet, common_samples
from mmkv_bench.tables.score_table import Entry, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE, Rows, check, choose, choose_cells, latest, missing, with_limits

if TYPE_CHECKING:
    import pandas as pd

RANDOM = (
    "These answers come from random weights (model.weights=random), so they have no table of scores; their times, memory and "
    "kept entries are columns of the responses (docs/rows.md), and `--metric bytes` and others make tables of these; for "
    "scores, run a model with trained weights."
)


def build(
    rows: Rows,
    *,
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
) -> list[ScoreTable]:
    """Return all tables of the rows, ordered by context (model, dataset, protocol and the other `CONTEXT` columns).

    A metric of fidelity (distance from the full cache's token distributions) gets a table only if `metrics` names it;
    `score_text.fidelity_tables` prints all of them in one table.

    Args:
        datasets, protocols, readings, metrics: names to keep; None: all.

    Raises:
        ConfigError: there are no scores of trained weights, or the rows lack a given name.
        StoreError: rows contradict each other.
    """
    import pandas as pd

    if rows.samples.empty:
        raise ConfigError("No row is scored, so there is no table; run the same command again with stage=score.")
    check(rows.cells, rows.samples)
    trained = rows.cells[rows.cells["weights"] != "random"] if "weights" in rows.cells else rows.cells
    if trained.empty:
        raise ConfigError(RANDOM)
    rows = replace(rows, cells=with_limits(trained))
    is_kept = choose_cells(rows.cells, datasets, protocols, readings)
    choose(pd.Series(list(rows.names), dtype=object), metrics, "metric")
    shared_parts = _Parts(rows)
    cells = rows.cells.assign(place=np.arange(len(rows.cells)), latest=latest(rows.cells))[is_kept]
    tables = []
    for sweep in sweeps(cells):
        scored_metrics = shared_parts.sheet.metrics_of(sweep.places)
        table_metrics = [
            metric for metric in scored_metrics if (metric in metrics if metrics else metric not in FIDELITY)
        ]
        tables += [_table(sweep, metric, shared_parts) for metric in table_metrics]
    return tables


_METRICS = ("cell", "metric", "lmms_eval", "judge", "judge_prompts", "judge_temperature")


class _Parts:
    """Data that all tables share. lmms_eval: (hash, metric) -> lmms-eval's aggregate. judges: (hash, metric) -> judge."""

    def __init__(self, rows: Rows):
        import pandas as pd

        self.sheet = Sheet.of(rows.samples, list(rows.cells["cell"]))
        responses = [rows.responses] if isinstance(rows.responses, pd.DataFrame) else rows.responses
        self.audits = Audits(responses, self.sheet)
        self.full = rows.full
        self.primary = rows.primary
        self.lmms_eval: dict[tuple[str, str], float] = {}
        self.judges: dict[tuple[str, str], str] = {}
        columns_read = [name for name in _METRICS if name in rows.metrics]
        for row in rows.metrics[columns_read].to_dict("records"):
            key = row["cell"], row["metric"]
            if not missing(row["lmms_eval"]):
                self.lmms_eval[key] = float(row["lmms_eval"])
            if not missing(row.get("judge")):
                self.judges[key] = _judge(row)


def _table(sweep: Sweep, metric: str, parts: _Parts) -> ScoreTable:
    groups: dict[tuple[str, str], SeedGroup] = {}
    unscored_answers: dict[tuple[str, str], int] = {}
    sheet = parts.sheet
    for key, group in sweep.groups.items():
        if unscored := sum(parts.audits.unscored(cell) for cell in group.places):
            unscored_answers[key] = unscored
        cells = zip(group.places, group.cells, group.seeds, strict=True)
        scored = [cell for cell in cells if len(sheet.sample[sheet.rows(cell[0], metric)])]
        if scored:
            groups[key] = SeedGroup(*zip(*scored, strict=True))
            groups[key].refuse_equal_seeds()
    scores = {key: sheet.scores(group.places, metric) for key, group in groups.items()}
    numbers_of = headlines(list(scores.values()), sweep.context["dataset"], metric)
    common_ids = common_samples(scores.values())
    entries = {
        key: _entry(groups[key], score, numbers, metric, parts)
        for (key, score), numbers in zip(scores.items(), numbers_of, strict=True)
    }
    if len(common_ids):
        for key, score in scores.items():
            same_samples = score.n_ok == score.n == len(common_ids)  # then the headline is over these already
            shared = entries[key].value if same_samples else aggregate(score.among(common_ids), aggregate_of(metric))
            entries[key] = replace(entries[key], common=shared)
    labels_with_rows = {label for label, _ in (*entries, *unscored_answers)}  # a cell is stored before its first answer
    methods = tuple(method for method in sweep.methods if method.label in labels_with_rows)
    budgets = tuple(sorted({budget for _, budget in entries if budget}, key=Decimal))
    table = ScoreTable(sweep.context, metric, sweep.axis, budgets, methods, entries, unscored_answers)
    table.columns = columns(table)
    table.free = _free(sweep, table, parts.full)
    table.calibrations = {method.label: sweep.calibrations[method.label] for method in methods if method.calibrated}
    table.gate, table.primary = _gate(sweep, table), parts.primary
    table.cpus, table.weights_files = sweep.cpus, sweep.weights_files
    table.versions = {label: score for label, score in sweep.versions.items() if label in labels_with_rows}
    return table


def _free(sweep: Sweep, table: ScoreTable, answers: pd.DataFrame | None) -> float | None:
    full = next((method.label for method in table.methods if method.base == BASELINE), None)
    entry = None if full is None else table.entries.get((full, ""))
    if entry is None or answers is None:
        return None
    is_full_answer = answers["cell"].isin(sweep.full)
    return free_share(
        answers[is_full_answer & answers["sample_id"].isin(entry.scores.sample_ids)], table.context["protocol"]
    )


def _gate(sweep: Sweep, table: ScoreTable) -> str | None:
    """Return `ScoreTable.gate`."""
    if sweep.config is None:
        return None
    entry = table.entries.get((BASELINE, ""))
    gate = find(sweep.config, table.dataset, table.metric)
    value, n = (entry.value, entry.scores.n) if entry else (None, 0)
    return verdict(gate, value, n, table.context["transformers"])


def _entry(group: SeedGroup, scores: Scores, numbers: Mapping[str, Any], metric: str, parts: _Parts) -> Entry:
    keys = [(cell, metric) for cell in group.cells]
    aggregates = [parts.lmms_eval[key] for key in keys if key in parts.lmms_eval]
    complete = len(aggregates) == len(keys)
    own_scale = [upstream(metric).as_ours(value, scores.n) for value in aggregates if complete]
    rows = sum(len(parts.sheet.sample[parts.sheet.rows(cell, metric)]) for cell in group.places)
    return Entry(
        scores=scores,
        **{name: numbers[name] for name in ("value", "low", "high", "interval")},
        zero=numbers["value_failures_zero"],
        common=None,
        seeds=tuple(sorted(seed for seed in group.seeds if seed is not None)),
        uneven_seeds=rows != scores.n * len(group.cells),
        audit=parts.audits.audit(group.places, metric),
        lmms_eval=float(np.mean(aggregates)) if complete else None,
        lmms_eval_ours=float(np.mean(own_scale)) if complete else None,
        unread=int(sum(np.nansum(parts.sheet.value[parts.sheet.rows(cell, PARSE_FAILED)]) for cell in group.places)),
        judges=tuple(sorted({parts.judges[key] for key in keys if key in parts.judges})),
        cells=group.cells,
    )


def _judge(row: Mapping[str, Any]) -> str:
    prompts = "unknown" if missing(row["judge_prompts"]) else row["judge_prompts"][:8]
    judge_temperature = row["judge_temperature"]
    temperature = "several temperatures" if missing(judge_temperature) else f"temperature {judge_temperature:g}"
    return f"{row['judge']} ({temperature}, prompts {prompts})"

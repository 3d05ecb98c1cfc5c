"""Rows -> tables: cells grouped by context, metric and kind of budget; seeds joined; pairs compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.tables.audit import Audit, audit
from mmkv_bench.tables.calibrated import artefacts, seen
from mmkv_bench.tables.compare import Pair, correct, paired
from mmkv_bench.tables.free import share
from mmkv_bench.tables.gates import find, gates_of, verdict
from mmkv_bench.tables.intervals import Aggregator
from mmkv_bench.tables.known import FIDELITY, PARSE_FAILED, Pooled, is_share, lower_is_better, upstream
from mmkv_bench.tables.metrics import aggregate, aggregator_of, headline
from mmkv_bench.tables.rows import (
    BASELINE,
    CONTEXT,
    Rows,
    align,
    check,
    choose,
    context_key,
    gather,
    latest,
    missing,
    with_limits,
)
from mmkv_bench.tables.table import Entry, Method, Table, common_ids

if TYPE_CHECKING:
    import pandas as pd

RANDOM = (
    "These rows are answers of random weights (model.weights=random): they tell time, memory and what was kept (columns of "
    "the responses, docs/rows.md), never accuracy, and no table of scores is made of them. Run a model with trained "
    "weights for one."
)


def build(
    rows: Rows,
    *,
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    aggregators: Mapping[str, Aggregator] | None = None,
) -> list[Table]:
    """All tables of the rows, ordered by context; the filters name what to keep (None = everything, but of the metrics not
    those of fidelity, which every run has and `fidelity.py` prints together).

    aggregators: metric -> aggregate, where it is not the one known by the metric's name.
    Raises ConfigError when a filter names what the rows do not hold, StoreError when rows contradict each other.
    """
    if rows.samples.empty:
        raise ConfigError("There are no scored rows to make a table of: run the same command again with stage=score.")
    check(rows.cells, rows.samples)
    rows = _of_trained(replace(rows, cells=with_limits(rows.cells)))
    keep = choose(rows.cells["dataset"], datasets, "dataset") & choose(rows.cells["protocol"], protocols, "protocol")
    keep &= latest(rows.cells)
    chosen = choose(rows.cells["reading"], readings, "reading") | rows.cells["reading"].isna()
    wanted = choose(rows.samples["metric"], metrics, "metric")
    samples = rows.samples[wanted if metrics else wanted & ~rows.samples["metric"].isin(FIDELITY)]
    parts = _Parts(rows, samples, aggregators or {})
    tables = []
    for _, group in rows.cells[keep & chosen].groupby(list(CONTEXT), dropna=False, sort=True):
        for axis in [kind for kind in ("entries", "fraction") if (group["budget_kind"] == kind).any()] or ["none"]:
            cells = group[group["budget_kind"].isin([axis, "none"])]
            for metric in sorted({metric for cell, metric in parts.samples if cell in set(cells["cell"])}):
                tables.append(_table(cells, metric, axis, parts))
    return tables


def _of_trained(rows: Rows) -> Rows:
    """Without the cells of random weights, whose scores mean nothing.

    Raises ConfigError when no other cell is there.
    """
    if "weights" not in rows.cells:
        return rows
    random = rows.cells["weights"] == "random"
    if random.all():
        raise ConfigError(RANDOM)
    cells = rows.cells[~random]
    return replace(rows, cells=cells, samples=rows.samples[rows.samples["cell"].isin(set(cells["cell"]))])


class _Parts:
    """The frames cut by cell once, for look-up."""

    def __init__(self, rows: Rows, samples: pd.DataFrame, aggregators: Mapping[str, Aggregator]):
        self.samples = dict(iter(samples.groupby(["cell", "metric"])))
        self.responses = dict(iter(rows.responses.groupby("cell"))) if len(rows.responses) else {}
        self.lmms_eval = {
            (row["cell"], row["metric"]): float(row["lmms_eval"])
            for _, row in rows.metrics.iterrows()
            if not missing(row["lmms_eval"])
        }
        self.judges = {
            (row["cell"], row["metric"]): _judge(row)
            for _, row in rows.metrics.iterrows()
            if not missing(row.get("judge"))
        }
        self.aggregators = aggregators
        self.full = rows.full
        failed = rows.samples[rows.samples["metric"] == PARSE_FAILED]
        self.unread = {cell: int(values.sum()) for cell, values in failed.groupby("cell")["value"]}
        self.scored = {cell: set(ids) for cell, ids in rows.samples.groupby("cell")["sample_id"]}

    def unscored(self, cell: str) -> int:
        """Answers of a cell without any score: not every sample has every metric (those of a mix are for one kind)."""
        answers = self.responses.get(cell)
        return 0 if answers is None else len(set(answers["sample_id"]) - self.scored.get(cell, set()))

    def answers(self, cell: str, samples: pd.DataFrame) -> pd.DataFrame | None:
        """The answers behind the scores of a cell."""
        answers = self.responses.get(cell)
        return None if answers is None else answers[answers["sample_id"].isin(samples["sample_id"])]


def _table(cells: pd.DataFrame, metric: str, axis: str, parts: _Parts) -> Table:
    methods = _methods(cells)
    aggregator = aggregator_of(metric, parts.aggregators)
    context = dict(zip(CONTEXT, context_key(cells.iloc[0]), strict=True))
    found: dict[tuple[str, str], Entry] = {}
    waiting: dict[tuple[str, str], int] = {}
    for method in methods:
        own = cells[[_variant(row) == method.variant for _, row in cells.iterrows()]]
        for budget in sorted({_budget(row) for _, row in own.iterrows()}):
            group = own[[_budget(row) == budget for _, row in own.iterrows()]]
            if unscored := sum(parts.unscored(cell) for cell in group["cell"]):
                waiting[method.label, budget] = unscored
            scored = group[[(cell, metric) in parts.samples for cell in group["cell"]]]
            if len(scored):
                found[method.label, budget] = _entry(scored, metric, context["dataset"], parts)
    common = common_ids(found.values())
    entries = found
    if len(common):
        shared = {key: aggregate(entry.scores.among(common), aggregator) for key, entry in found.items()}
        entries = {key: replace(entry, common=shared[key]) for key, entry in found.items()}
    begun = {label for label, _ in (*entries, *waiting)}  # cells are stored before their first answer is
    methods = tuple(method for method in methods if method.label in begun)
    budgets = tuple(sorted({budget for _, budget in entries if budget}, key=Decimal))
    table = Table(context, metric, axis, budgets, methods, entries, waiting)
    table.pairs = _pairs(table, aggregator)
    table.gate = _gate(cells, table)
    table.free = _free(cells, table, parts.full)
    table.calibrations = _calibrations(cells, methods)
    return table


def _free(cells: pd.DataFrame, table: Table, answers: pd.DataFrame | None) -> float | None:
    """The share of the answers that no method can change; None without answers of `full` to count it from."""
    full = next((method.label for method in table.methods if method.base == BASELINE), None)
    entry = table.entries.get((full, ""))
    if entry is None or answers is None:
        return None
    own = answers["cell"].isin(cells["cell"][cells["base"] == BASELINE])
    return share(answers[own & answers["sample_id"].isin(entry.scores.sample_ids)], table.context["protocol"])


def _calibrations(cells: pd.DataFrame, methods: Sequence[Method]) -> dict[str, tuple[str, ...]]:
    """What the artefacts of each calibrated line were made of, by label."""
    lines = [method for method in methods if method.calibrated]
    configs = [cells["config"][cells["parameters"] == line.parameters] for line in lines]
    return {line.label: seen(own, artefacts(line.parameters)) for line, own in zip(lines, configs, strict=True)}


def _gate(cells: pd.DataFrame, table: Table) -> str | None:
    """The sentence on the full-cache gate; None where neither the model's file nor the run expects anything."""
    full = cells[cells["base"] == BASELINE]
    known = next((config for config in (*full["config"], *cells["config"]) if gates_of(config)), None)
    if known is None:
        return None
    entry = table.entries.get((BASELINE, ""))
    gate = find(known, table.dataset, table.metric)
    value, n = (entry.value, entry.scores.n) if entry else (None, 0)
    return verdict(gate, value, n, table.context["transformers"])


def _entry(cells: pd.DataFrame, metric: str, dataset: str, parts: _Parts) -> Entry:
    import pandas as pd

    seeds = [None if missing(seed) else int(seed) for seed in cells["seed"]]
    if len(set(seeds)) < len(seeds):
        names = ", ".join(sorted(cells["cell"]))
        raise StoreError(
            f"Cells {names} are the same method, parameters, budget and seed but differ in something that no table "
            "shows (see their `config`): keep them in rows folders of their own."
        )
    own = [parts.samples[cell, metric] for cell in cells["cell"]]
    scores = gather(pd.concat(own))
    found = [parts.answers(cell, samples) for cell, samples in zip(cells["cell"], own, strict=True)]
    responses = [answers for answers in found if answers is not None]
    numbers = headline(scores, dataset, aggregator_of(metric, parts.aggregators), metric)
    aggregates = [parts.lmms_eval.get((cell, metric)) for cell in cells["cell"]]
    own_scale = None if None in aggregates else [upstream(metric).as_ours(v, scores.n) for v in aggregates]
    return Entry(
        scores=scores,
        value=numbers["value"],
        low=numbers["low"],
        high=numbers["high"],
        interval=numbers["interval"],
        zero=numbers["value_failures_zero"],
        common=None,
        seeds=tuple(sorted(seed for seed in seeds if seed is not None)),
        uneven_seeds=sum(map(len, own)) != scores.n * len(own),
        audit=audit(pd.concat(responses)) if responses else Audit(),
        lmms_eval=None if None in aggregates else float(np.mean(aggregates)),
        lmms_eval_ours=None if own_scale is None else float(np.mean(own_scale)),
        unread=sum(parts.unread.get(cell, 0) for cell in cells["cell"]),
        judges=tuple(sorted({parts.judges[cell, metric] for cell in cells["cell"] if (cell, metric) in parts.judges})),
    )


def _judge(row: pd.Series) -> str:
    """A judge, with all that makes its scores comparable."""
    prompts = "unknown" if missing(row["judge_prompts"]) else row["judge_prompts"][:8]
    temperature = (
        "several temperatures" if missing(row["judge_temperature"]) else f"temperature {row['judge_temperature']:g}"
    )
    return f"{row['judge']} ({temperature}, prompts {prompts})"


def _pairs(table: Table, aggregator: Aggregator | None) -> list[Pair]:
    compared = []
    for budget in table.budgets or ("",):
        present = [method.label for method in table.methods if table.entry(method.label, budget)]
        for a, b in combinations(present, 2):
            both = table.entry(a, budget).scores, table.entry(b, budget).scores
            scores = align(*both, parts=isinstance(aggregator, Pooled))
            difference = paired(*scores, table.dataset, aggregator, share=is_share(table.metric))
            if difference is not None:
                compared.append((budget, a, b, difference))
    return correct(compared, falling=lower_is_better(table.metric))


def _budget(cell: pd.Series) -> str:
    """The budget as asked: "64" entries, "0.2" of the prompt, "" for none."""
    kind = cell["budget_kind"]
    if kind == "entries":
        return str(int(cell["budget_entries"]))
    return str(cell["budget_fraction"]) if kind == "fraction" else ""


def _variant(cell: pd.Series) -> tuple[str, str, str | None, str]:
    """What makes a line of a table: display name, family, reading, parameters (JSON)."""
    return (
        cell["method"],
        cell["base"],
        None if missing(cell["reading"]) else cell["reading"],
        "{}" if missing(cell["parameters"]) else cell["parameters"],
    )


def _methods(cells: pd.DataFrame) -> tuple[Method, ...]:
    """The table's lines: `full`, `random`, then the others by name.

    Namesakes of one reading tell the parameters in which they differ; where the table holds both readings, the released
    ones are told.
    """
    variants = {_variant(row): row for _, row in cells.iterrows()}
    told = {variant: {"base": variant[1], **json.loads(variant[3])} for variant in variants}
    mixed = len({reading for _, _, reading, _ in variants if reading}) > 1
    lines = []
    for variant, row in variants.items():
        name, base, reading, parameters = variant
        own = told[variant]
        namesakes = [told[other] for other in variants if (other[0], other[2]) == (name, reading)]
        differing = sorted({key for other in namesakes for key in other | own if other.get(key) != own.get(key)})
        words = [f"{key}={own.get(key)}" for key in differing] + (
            ["released"] if mixed and reading == "released" else []
        )
        label = name + (f" ({', '.join(words)})" if words else "")
        lines.append(Method(label, name, base, bool(row["tuned"]), reading, parameters, row["budget_kind"] != "none"))
    return tuple(sorted(lines, key=lambda line: (line.base != BASELINE, line.base != "random", line.label)))

"""Tables as csv: unrounded numbers, one line per table cell or per pair, an empty field for null."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.tables.compare import Pair, every_pair
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.score_table import Entry, ScoreTable

if TYPE_CHECKING:
    import pandas as pd


SHORT = 12
"""Digits of a cell's hash that tables show; every command takes them."""


def csv_cells(tables: Sequence[ScoreTable]) -> str:
    """One line per table cell; `full` has one line per table, without a budget."""
    return as_csv(_cells(tables))


def frame(tables: Sequence[ScoreTable]) -> pd.DataFrame:
    """The lines of `csv_cells` as a frame: one row per table cell."""
    import pandas as pd

    return pd.DataFrame(_cells(tables))


def csv_pairs(tables: Sequence[ScoreTable]) -> str:
    """One line per two lines of a table at a budget. Of two that compete `low` and `high` are at Holm's level, of others, to
    which `holm_level` and the columns beside it do not apply, at 95 %."""
    return as_csv([_pair(table, pair) for table in tables for pair in every_pair(table)])


def _cells(tables: Sequence[ScoreTable]) -> list[dict[str, Any]]:
    return [
        _cell(table, method, budget, table.entries[method.label, budget])
        for table in tables
        for method in table.methods
        for budget in ("", *table.budgets)
        if (method.label, budget) in table.entries
    ]


def _cell(table: ScoreTable, method: Line, budget: str, entry: Entry) -> dict[str, Any]:
    audit = entry.audit
    rank = table.rank(method.label, budget) or (None, None)
    return {
        **table.context,
        "reading": method.reading,
        "metric": table.metric,
        "method": method.label,
        "base": method.base,
        "tuned": method.tuned,
        "parameters": method.parameters,
        "budget_kind": table.axis if budget else "none",
        "budget": budget,
        "seeds": " ".join(map(str, entry.seeds)),
        "n": entry.scores.n,
        "n_ok": entry.scores.n_ok,
        "value": entry.value,
        "low": entry.low,
        "high": entry.high,
        "interval": entry.interval,
        "value_failures_zero": entry.zero,
        "value_common": entry.common,
        "n_common": len(table.common_ids),
        "best": budget != "" and method.label in table.best(budget),
        "competes": budget in table.columns and method.label in table.columns[budget].names,
        "rank_low": rank[0],
        "rank_high": rank[1],
        "lmms_eval": entry.lmms_eval,
        "lmms_eval_ours": entry.lmms_eval_ours,
        "answers": audit.n,
        "over_budget": audit.over,
        "excess_mean": audit.excess_mean,
        "excess_worst": audit.excess_worst,
        "from_prefill": audit.from_prefill,
        "text_before_cut": audit.text_before_cut,
        "fallbacks": " ".join(f"{reason}={n}" for reason, n in audit.fallbacks.items()),
        "cells": " ".join(cell[:SHORT] for cell in entry.cells),
    }


def _pair(table: ScoreTable, pair: Pair) -> dict[str, Any]:
    return {
        **table.context,
        "readings": " ".join(table.readings),
        "metric": table.metric,
        "budget_kind": table.axis,
        "budget": pair.budget,
        "a": pair.a,
        "b": pair.b,
        "n": pair.n,
        "difference": pair.difference,
        "low": pair.low,
        "high": pair.high,
        "p": pair.p,
        "test": pair.test,
        "compete": pair.compete,
        "holm_level": pair.level,
        "p_holm": pair.adjusted,
        "separated": pair.better is not None if pair.compete else None,
        "better": pair.better,
    }


def as_csv(lines: Sequence[dict[str, Any]]) -> str:
    """Records that have the same keys, with these as the header."""
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: inert(value) for key, value in line.items()} for line in lines)  # None: an empty field
    return out.getvalue()


def inert(value: Any) -> Any:
    """A field that no spreadsheet takes for a formula: a text that begins like one gets a quote before it; numbers stay."""
    if not isinstance(value, str) or len(value) < 2 or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value

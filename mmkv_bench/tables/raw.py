"""Tables as csv: unrounded numbers, one line per table cell or per pair, an empty field for null."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from mmkv_bench.tables.compare import Pair
from mmkv_bench.tables.table import Entry, Method, Table


def csv_cells(tables: Sequence[Table]) -> str:
    """One line per table cell; `full` has one line per table, without a budget."""
    return _csv(
        [
            _cell(table, method, budget, table.entries[method.label, budget])
            for table in tables
            for method in table.methods
            for budget in ("", *table.budgets)
            if (method.label, budget) in table.entries
        ]
    )


def csv_pairs(tables: Sequence[Table]) -> str:
    """One line per two methods at a budget, separated or not; `low` and `high` are at Holm's level."""
    return _csv([_pair(table, pair) for table in tables for pair in table.pairs])


def _cell(table: Table, method: Method, budget: str, entry: Entry) -> dict[str, Any]:
    audit = entry.audit
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
        "lmms_eval": entry.lmms_eval,
        "lmms_eval_ours": entry.lmms_eval_ours,
        "answers": audit.n,
        "over_budget": audit.over,
        "excess_mean": audit.excess_mean,
        "excess_worst": audit.excess_worst,
        "from_prefill": audit.from_prefill,
        "text_before_cut": audit.text_before_cut,
        "fallbacks": " ".join(f"{reason}={n}" for reason, n in audit.fallbacks.items()),
    }


def _pair(table: Table, pair: Pair) -> dict[str, Any]:
    return {
        **table.context,
        "readings": " ".join(table.readings),
        "metric": table.metric,
        "budget_kind": table.axis,
        "budget": pair.budget,
        "a": pair.a,
        "b": pair.b,
        "n": pair.difference.n,
        "difference": pair.difference.value,
        "low": pair.low,
        "high": pair.high,
        "holm_level": pair.step.level,
        "p": pair.difference.p,
        "p_holm": pair.step.adjusted,
        "test": pair.difference.kind,
        "separated": pair.separated,
        "better": pair.better,
    }


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)  # None becomes an empty field
    return out.getvalue()

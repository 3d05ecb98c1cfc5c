"""What the overview and the table show: one view per table of scores, one entry per cell of such a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmkv_bench.report import families
from mmkv_bench.report.columns import Columns, number
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.audit import Audit
from mmkv_bench.tables.captions import axis_words, caption, line_label
from mmkv_bench.tables.cost_names import KNOWN
from mmkv_bench.tables.costs import CostEntry, CostTable
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.notes import score_notes
from mmkv_bench.tables.rows import CONTEXT
from mmkv_bench.tables.score_table import Entry, ScoreTable

COSTS = (KNOWN["bytes_held"], KNOWN["bytes_device"], KNOWN["tpot_s"])
TEXTS = ("method", "base", "reading", "budget", "fallbacks", "audit")
OTHERS = (
    *("view", "cells", "value", "low", "high", "zero", "n", "n_ok", "rank_low", "rank_high", "best", "over"),
    *("bytes", "bytes_low", "bytes_high", "bytes_ratio", "token_s", "token_low", "token_high", "token_ratio"),
)


class Views:
    """The tables of all stores, families of them, and their entries. `cells`: of each store, the names of the cells that an
    entry has."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.families: list[dict[str, Any]] = []
        self.entries = Columns(TEXTS, OTHERS)
        self._keys: list[tuple[str, ...]] = []  # of the entries: what a pass of another store is found by

    def add(self, store: int, tables: Sequence[ScoreTable], costs: Sequence[CostTable], name: Any) -> None:
        """The tables of one store. costs: of the same store; name: cell hash -> the name of its page's data."""
        known = _costs(costs)
        self.families += families.shown(store, tables, len(self.tables))
        for table in tables:
            number_of_view = len(self.tables)
            self.tables.append(_view(store, table, tables))
            for method in table.methods:
                for budget in ("", *table.budgets):
                    entry = table.entries.get((method.label, budget))
                    if entry is not None:
                        own = known.get(
                            (_where(table.context), method.variant, table.axis if budget else "none", budget), {}
                        )
                        self._entry(
                            number_of_view, table, method, budget, entry, own, [name(cell) for cell in entry.cells]
                        )

    def _entry(
        self,
        view: int,
        table: ScoreTable,
        method: Line,
        budget: str,
        entry: Entry,
        costs: Mapping[str, CostEntry],
        cells: Sequence[str],
    ) -> None:
        low, high = table.rank(method.label, budget) or (None, None)
        self._keys.append(_anywhere(table.context, method, table.axis, budget))
        held, device, took = (costs.get(cost.key) for cost in COSTS)
        held = held if held is not None and held.value is not None else device  # rows that are older than bytes_held
        self.entries.add(
            view=view,
            cells=cells,
            method=line_label(method),
            base=method.base,
            reading=method.reading,
            budget=budget,
            value=entry.value,
            low=entry.low,
            high=entry.high,
            zero=entry.zero,
            n=entry.scores.n,
            n_ok=entry.scores.n_ok,
            rank_low=low,
            rank_high=high,
            best=int(budget != "" and method.label in table.best(budget)),
            over=entry.audit.over,
            fallbacks="; ".join(f"{reason}: {n} of {entry.audit.n}" for reason, n in entry.audit.fallbacks.items()),
            audit=audit_words(entry.audit),
            **_cost("bytes", held),
            **_cost("token", took, "_s"),
        )

    def join_passes(self, tables: Sequence[CostTable]) -> list[str]:
        """Times of passes (`scenario=efficiency`), of any store, to entries without a time of their own; model, method, reading,
        parameters, protocol and budget must agree. Returns a sentence on it where there are passes.

        tables: of costs, of all stores; of passes those of the smallest batch and its longest prompt count.
        """
        passes = [table for table in tables if table.per_pass]
        if not passes:
            return []
        shape = max((table.shape for table in passes), key=lambda one: (-int(one["batch"]), int(one["prompt_tokens"])))
        found = {
            _anywhere(table.context, method, table.axis, budget): table.entries[method.label, budget]
            for table in passes
            if table.shape == shape
            for method, budget in table.lines()
        }
        joined = 0
        for place, key in enumerate(self._keys):
            took = found.get(key, {}).get(COSTS[-1].key)
            if took is not None and took.value is not None and self.entries.value("token_s", place) is None:
                joined += 1
                for name, value in _cost("token", took, "_s").items():
                    self.entries.put(name, place, value)
        words = f"passes of {shape['prompt_tokens']} prompt tokens, batch {shape['batch']}"
        return [f"Times per token of {joined} of {self.entries.n} lines are those of {words}."]


def audit_words(audit: Audit) -> str:
    """What the counted entries of a cell's answers say, in a few words."""
    if not audit.n:
        return "no counted answers"
    said = [f"all {audit.n} answers within the budget"]
    if audit.over:
        mean, worst = audit.excess_mean, audit.excess_worst
        said = [f"{audit.over} of {audit.n} answers over the budget, by {mean:.1%} on average and {worst:.1%} at most"]
    if audit.from_prefill:
        said.append(f"{audit.from_prefill} answers wholly from the full prefill")
    if audit.text_before_cut:
        said.append(f"{audit.text_before_cut} with question text before the cut")
    if audit.packed:
        said.append(f"packed entries: {audit.device:.2f} of full's bytes on the device")
    if audit.retrievable:
        said.append(f"entries come back from the host: {audit.host:.2f} of full's bytes there")
    return "; ".join(said)


def _cost(name: str, entry: CostEntry | None, unit: str = "") -> dict[str, Any]:
    """value, ends and ratio to full of one cost, by the names of the columns."""
    found = (None,) * 4 if entry is None else (entry.value, entry.low, entry.high, entry.ratio)
    keys = (f"{name}{unit}", f"{name}_low", f"{name}_high", f"{name}_ratio")
    return dict(zip(keys, map(number, found), strict=True))


def _anywhere(context: Mapping[str, str], method: Line, axis: str, budget: str) -> tuple[str, ...]:
    kind = axis if budget else "none"
    return context["model"], context["protocol"], method.base, method.reading or "", method.parameters, kind, budget


def _where(context: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(context[name] for name in CONTEXT)


def _costs(tables: Sequence[CostTable]) -> dict[tuple[Any, ...], Mapping[str, CostEntry]]:
    """(context, variant, kind of budget, budget) -> costs of a cell's own answers, of the first device that has them."""
    found: dict[tuple[Any, ...], Mapping[str, CostEntry]] = {}
    for table in tables:
        if table.per_pass:
            continue
        for method, budget in table.lines():
            key = (_where(table.context), method.variant, table.axis if budget else "none", budget)
            found.setdefault(key, table.entries[method.label, budget])
    return found


def _view(store: int, table: ScoreTable, tables: Sequence[ScoreTable]) -> dict[str, Any]:
    return {
        "store": store,
        **{name: table.context[name] for name in ("model", "dataset", "protocol")},
        "metric": table.metric,
        "axis": table.axis,
        "axis_words": axis_words(table.axis),
        "budgets": list(table.budgets),
        "less_is_better": lower_is_better(table.metric),
        "caption": caption(table, tables),
        "notes": [note.text for note in sorted(score_notes(table), key=lambda note: note.rank)],
    }

"""Tables of costs as `Table`. The largest value of a column decides its unit; csv has unrounded seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.tables.cost_rows import Cost
from mmkv_bench.tables.costs import LIMIT, TIMED, CostEntry, CostTable
from mmkv_bench.tables.score_table import Line
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table
from mmkv_bench.tables.text import axis_words, cell_words, context_words, line_label, number, number_span, unit_of

OVER_FULL = "/ full"


def tables_of_costs(tables: Sequence[CostTable], *, intervals: bool = True) -> list[Table]:
    """Return one `Table` per table of costs. A row is a method at a budget; a cost has columns of medians and of ratios."""
    return [
        Table(
            _title(table),
            _caption(table, tables, intervals),
            [_grid(table, intervals)],
            [*_notes(table)],
            records=partial(_records, table),
        )
        for table in tables
    ]


def _grid(table: CostTable, intervals: bool) -> Grid:
    header: list[str] = ["method", "budget"]
    columns: list[list[GridCell | str]] = []
    for cost in table.costs:
        entries = [table.entries[method.label, budget].get(cost.key) for method, budget in table.lines()]
        size, unit = unit_of(cost.unit, [entry.value for entry in entries if entry and entry.value is not None])
        header.append(f"{cost.name} [{unit}]" if unit else cost.name)
        columns.append([_cell(entry, size, intervals) for entry in entries])
        if any(entry and entry.ratio is not None for entry in entries):
            header.append(OVER_FULL)
            columns.append([_ratio(entry, intervals) for entry in entries])
        if cost.key == TIMED and table.roofline is not None:
            header.append(f"{LIMIT} [{unit}]")
            roofline_limits = [table.least.get((method.label, budget)) for method, budget in table.lines()]
            columns.append([number(None if value is None else value / size) for value in roofline_limits])
    line_names = [[line_label(method), budget or "all"] for method, budget in table.lines()]
    return Grid(
        header, [[*name, *(column[row] for column in columns)] for row, name in enumerate(line_names)], labels=2
    )


def _cell(entry: CostEntry | None, size: float, intervals: bool) -> GridCell:
    if entry is None or not entry.n:
        return GridCell("-")
    if entry.value is not None:
        interval = number_span(entry.low, entry.high, size) if intervals else ""
        return GridCell(number(entry.value / size), entry.value, interval)
    if not entry.known and entry.failed:
        return GridCell(entry.failed)
    return GridCell(f"{entry.known}/{entry.n} {'ok' if entry.failed else 'known'}")


def _ratio(entry: CostEntry | None, intervals: bool) -> GridCell:
    if entry is None or entry.ratio is None:
        return GridCell("")
    interval = number_span(entry.ratio_low, entry.ratio_high) if intervals else ""
    return GridCell(number(entry.ratio), entry.ratio, interval)


def _title(table: CostTable) -> str:
    if not table.per_pass:
        return f"{table.context['dataset']}, costs"
    shape = table.shape
    visual = f" ({shape['visual_tokens']} visual)" if shape["visual_tokens"] else ""
    prefill = f" ({shape['batch_prefill']})" if shape["batch"] != 1 else ""
    return (
        f"{shape['dataset']}, {shape['prompt_tokens']} prompt tokens{visual}, batch {shape['batch']}{prefill}, "
        f"{shape['new_tokens']} new tokens"
    )


def _caption(table: CostTable, tables: Sequence[CostTable], intervals: bool) -> str:
    contexts = [other.context for other in tables]
    caption_parts = [axis_words(table.axis), *context_words(table.context, table.readings, contexts)]
    device = f"device={table.context['device']}"
    caption_parts += [device] * (device not in caption_parts)
    timed_keys = {cost.key for cost in table.costs if cost.unit in ("seconds", "tokens/s")}
    entries = [(key, entry) for row in table.entries.values() for key, entry in row.items() if entry.value is not None]
    all_entries = [entry for _, entry in entries]
    # a pass without timing counts bytes too
    sizes = sorted({entry.n for entry in [entry for key, entry in entries if key in timed_keys] or all_entries})
    unit_name = "repeats" if table.per_pass else "samples"
    caption_parts.append(f"medians of {_ends([str(size) for size in sizes])} {unit_name}" if sizes else "medians")
    levels = sorted({entry.level for entry in all_entries if entry.level is not None and entry.low != entry.high})
    if intervals and levels:
        caption_parts.append(f"{_ends([f'{level:.0%}' for level in levels])} intervals")
    return "; ".join(caption_parts)


def _ends(texts: Sequence[str]) -> str:
    """Return the first and the last text as `3 to 5`, or as `3` if they are equal."""
    return " to ".join(dict.fromkeys([texts[0], texts[-1]]))


def _notes(table: CostTable) -> Iterator[Note]:
    entries = [entry for costs in table.entries.values() for entry in costs.values()]
    shown_keys = {cost.key for cost in table.costs}
    if table.random_weights:
        yield Note("Random weights: times and bytes are those of the true shape, answers mean nothing.", Rank.WARNING)
    if table.weights_files:
        yield Note(f"Weights: {'; '.join(table.weights_files)}; bytes and times are of the dequantised ones.")
    if table.disturbed:
        yield Note(f"Disturbed: {'; '.join(table.disturbed)}.", Rank.WARNING)
    if any(entry.ratio is not None for entry in entries):
        unit_name = "repeat" if table.per_pass else "sample"
        text = f"{OVER_FULL}: median over {unit_name}s of the method's value divided by full's of the same {unit_name}."
        yield Note(text, Rank.MARK)
    levels = {entry.level for entry in entries if entry.level is not None}
    if levels:
        few_values_text = "; with fewer than six values, the least and the largest" if min(levels) < LEVEL else ""
        yield Note(f"Intervals of medians are order statistics{few_values_text}.")
    if table.per_pass and TIMED in shown_keys:
        yield Note("tpot_s: the median over the steps of each repeat.")
        text = (
            "No roofline beside tpot_s: the model's shape is unknown or this device was not measured (mmkv-bench plan "
            "--measure)."
            if table.roofline is None
            else f"{LIMIT}: the roofline of a step, the longer of reading weights and kept entries at "
            f"{table.roofline.bandwidth / 1e9:.1f} GB/s (read-only, {table.roofline.device}) and computing with them, where the "
            "device's rate is known."
        )
        yield Note(text, Rank.MARK)
    if "peak_total" in shown_keys:
        yield Note(
            "peak: largest sum of live storages, weights included, counted in a pass that is not timed."
            if table.per_pass
            else "peak: device memory of the run by CUDA's allocator, or on a CPU the largest resident set of the process."
        )
    for reason, cells in table.fallbacks.items():
        fallback_cells = "; ".join(f"{cell_words(label, budget)} ({count})" for label, budget, count in cells)
        yield Note(f"Fallback {reason}: {fallback_cells}.", Rank.WARNING)


def _records(table: CostTable) -> list[dict[str, Any]]:
    return [_record(table, method, budget, cost) for method, budget in table.lines() for cost in table.costs]


def _record(table: CostTable, method: Line, budget: str, cost: Cost) -> dict[str, Any]:
    entry = table.entries[method.label, budget][cost.key]
    shape = table.shape or dict.fromkeys(("prompt_tokens", "visual_tokens", "batch", "batch_prefill", "new_tokens"))
    return {
        **table.context,
        **{name: value for name, value in shape.items() if name != "dataset"},
        "reading": method.reading,
        "method": method.label,
        **{name: getattr(method, name) for name in ("base", "tuned", "parameters")},
        "budget_kind": table.axis if budget else "none",
        "budget": budget,
        "metric": cost.name,
        "unit": cost.unit,
        "n": entry.n,
        "n_known": entry.known,
        "failed": entry.failed,
        "median": entry.value,
        "low": entry.low,
        "high": entry.high,
        "level": entry.level,
        "ratio_to_full": entry.ratio,
        "ratio_low": entry.ratio_low,
        "ratio_high": entry.ratio_high,
        "n_paired": entry.paired,
        LIMIT: table.least.get((method.label, budget)) if cost.key == TIMED else None,
    }

"""Tables of costs as sections, LaTeX and csv. Units are chosen by size, but for csv, which has seconds and bytes unrounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.tables.cost_names import Cost
from mmkv_bench.tables.costs import CostEntry, CostTable
from mmkv_bench.tables.latex import escape, stacked
from mmkv_bench.tables.notes import axis_words, context_words, line_label, where
from mmkv_bench.tables.raw import as_csv
from mmkv_bench.tables.sections import Grid, Notes, Section
from mmkv_bench.tables.step_limits import TIMED, StepLimits

OVER_FULL = "/ full"
LIMIT = "limit"
_SIZES = {"seconds": ((1.0, "s"), (1e-3, "ms")), "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))}
_TIMED = ("seconds", "tokens/s")


@dataclass(frozen=True)
class _Shown:
    """A table's texts: header, one list of cells per line."""

    header: list[str]
    grid: list[list[str]]


def cost_sections(tables: Sequence[CostTable], *, intervals: bool = True) -> list[Section]:
    """All tables, each with caption and notes."""
    return [_section(table, tables, intervals) for table in tables]


def cost_latex(tables: Sequence[CostTable], *, intervals: bool = True) -> str:
    r"""All tables, each a `table` environment with caption and notes, for `\usepackage{booktabs}`."""
    return stacked([_latex(table, tables, intervals) for table in tables])


def cost_csv(tables: Sequence[CostTable]) -> str:
    """One line per table, line and cost."""
    return as_csv(
        [
            _record(table, method.label, budget, cost)
            for table in tables
            for method, budget in table.lines()
            for cost in table.costs
        ]
    )


def number(value: float | None) -> str:
    """Three significant digits, never in powers of ten; whole numbers as they are; "-" for nothing."""
    if value is None:
        return "-"
    if value == 0 or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"


def unit_of(cost: Cost, values: Sequence[float]) -> tuple[float, str]:
    """(how much one of the unit is, its name): the largest unit of which the largest value is one at least."""
    sizes = _SIZES.get(cost.unit)
    if sizes is None:
        return 1.0, cost.unit
    most = max(values, default=0.0)
    return next((size for size in sizes if most >= size[0]), sizes[-1])


def _section(table: CostTable, tables: Sequence[CostTable], intervals: bool) -> Section:
    shown, remarks = _texts(table, intervals), _notes(table)
    grid, said = Grid(shown.header, shown.grid), (Notes(remarks),) if remarks else ()
    return Section(_title(table), _caption(table, tables, intervals), (grid, *said))


def _latex(table: CostTable, tables: Sequence[CostTable], intervals: bool) -> str:
    shown = _texts(table, intervals)
    lines = [r"\begin{table}", r"\centering"]
    lines += [rf"\caption{{{escape(f'{_title(table)}. {_caption(table, tables, intervals)}')}}}"]
    lines += [rf"\begin{{tabular}}{{ll{'c' * (len(shown.header) - 2)}}}", r"\toprule"]
    lines += [" & ".join(map(escape, shown.header)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(escape, row)) + r" \\" for row in shown.grid]
    lines += [r"\bottomrule", r"\end{tabular}"]
    remarks = r" \\ ".join(map(escape, _notes(table)))
    return "\n".join([*lines, r"\par\smallskip\footnotesize\raggedright " + remarks, r"\end{table}", ""])


def _texts(table: CostTable, intervals: bool) -> _Shown:
    header, columns = ["method", "budget"], []
    for cost in table.costs:
        entries = [table.entries[method.label, budget].get(cost.key) for method, budget in table.lines()]
        size, unit = unit_of(cost, [entry.value for entry in entries if entry and entry.value is not None])
        header.append(f"{cost.name} [{unit}]" if unit else cost.name)
        columns.append([_value(entry, size, intervals) for entry in entries])
        if any(entry and entry.ratio is not None for entry in entries):
            header.append(OVER_FULL)
            columns.append([_ratio(entry, intervals) for entry in entries])
        if cost.key == TIMED and table.limits is not None:
            header.append(f"{LIMIT} [{unit}]")
            least = [table.limits.least.get((method.label, budget)) for method, budget in table.lines()]
            columns.append([number(None if value is None else value / size) for value in least])
    names = [[line_label(method), budget or "all"] for method, budget in table.lines()]
    grid = [[*name, *(column[row] for column in columns)] for row, name in enumerate(names)]
    return _Shown(header, grid)


def _value(entry: CostEntry | None, size: float, intervals: bool) -> str:
    if entry is None or not entry.n:
        return "-"
    if entry.value is None:
        if not entry.known and entry.failed:
            return entry.failed
        return f"{entry.known}/{entry.n} {'ok' if entry.failed else 'known'}"
    return " ".join(
        part for part in (number(entry.value / size), _span(entry.low, entry.high, size) if intervals else "") if part
    )


def _ratio(entry: CostEntry | None, intervals: bool) -> str:
    if entry is None or entry.ratio is None:
        return ""
    return " ".join(
        part for part in (number(entry.ratio), _span(entry.ratio_low, entry.ratio_high) if intervals else "") if part
    )


def _span(low: float | None, high: float | None, size: float = 1.0) -> str:
    """`[0.71, 0.80]`; "" without an interval, and where nothing varies."""
    return "" if low is None or high is None or low == high else f"[{number(low / size)}, {number(high / size)}]"


def _title(table: CostTable) -> str:
    if not table.per_pass:
        return f"{table.context['dataset']}, costs"
    shape = table.shape
    visual = f" ({shape['visual_tokens']} visual)" if shape["visual_tokens"] else ""
    way = f" ({shape['batch_prefill']})" if shape["batch"] != 1 else ""
    return (
        f"{shape['dataset']}, {shape['prompt_tokens']} prompt tokens{visual}, batch {shape['batch']}{way}, "
        f"{shape['new_tokens']} new tokens"
    )


def _caption(table: CostTable, tables: Sequence[CostTable], intervals: bool) -> str:
    contexts = [other.context for other in tables]
    parts = [axis_words(table.axis), *context_words(table.context, table.readings, contexts)]
    device = f"device={table.context['device']}"
    parts += [device] * (device not in parts)
    known = {cost.key: cost.unit for cost in table.costs}
    named = [(key, one) for own in table.entries.values() for key, one in own.items() if one.value is not None]
    every = [entry for _, entry in named]
    timed = [
        entry for key, entry in named if known[key] in _TIMED
    ]  # bytes are also counted in a pass that is not timed
    sizes = sorted({entry.n for entry in timed or every})
    of = "repeats" if table.per_pass else "samples"
    parts.append(
        f"medians of {' to '.join(map(str, dict.fromkeys([sizes[0], sizes[-1]])))} {of}" if sizes else "medians"
    )
    levels = sorted({entry.level for entry in every if entry.level is not None and entry.low != entry.high})
    if intervals and levels:
        parts.append(f"{' to '.join(f'{level:.0%}' for level in dict.fromkeys([levels[0], levels[-1]]))} intervals")
    return "; ".join(parts)


def _notes(table: CostTable) -> list[str]:
    of = "repeat" if table.per_pass else "sample"
    lines = []
    if any(entry.ratio is not None for own in table.entries.values() for entry in own.values()):
        lines.append(
            f"{OVER_FULL}: the median over {of}s of what the method took over what full took with the same {of}."
        )
    levels = {entry.level for own in table.entries.values() for entry in own.values() if entry.level is not None}
    if levels:
        lines.append(
            "intervals of medians by order statistics"
            + ("" if min(levels) >= LEVEL else "; of fewer than six values they are the least and the largest")
            + "."
        )
    if table.per_pass and any(cost.key == TIMED for cost in table.costs):
        lines.append("tpot_s: of each repeat the median over its steps.")
        lines.append(_limit(table.limits))
    if any(cost.key == "peak_total" for cost in table.costs):
        lines.append(_peak(table))
    for reason, found in table.fallbacks.items():
        words = "; ".join(f"{where((label, budget))} ({count})" for label, budget, count in found)
        lines.append(f"fallback {reason}: {words}.")
    if table.disturbed:
        lines.append(f"disturbed: {'; '.join(table.disturbed)}.")
    if table.random_weights:
        lines.append("random weights: times and bytes are those of the true shape, answers mean nothing.")
    return lines


def _limit(limits: StepLimits | None) -> str:
    if limits is None:
        return (
            "No limit is beside tpot_s: the model's shape is not known here, or this device was not measured here "
            "(mmkv-bench plan --measure does)."
        )
    return (
        f"{LIMIT}: the roofline of a step, the longer of two times: that of reading weights and kept keys and values at "
        f"{limits.bandwidth / 1e9:.1f} GB/s, the read-only bandwidth of {limits.device}, and that of computing with them, where "
        "the device's rate is known."
    )


def _peak(table: CostTable) -> str:
    if table.per_pass:
        return "peak: most bytes of live storages, weights included, counted in a pass that is not timed."
    return "peak: device memory of the run by CUDA's allocator, or on a CPU the largest resident set of the process."


def _record(table: CostTable, label: str, budget: str, cost: Cost) -> dict[str, Any]:
    method = next(each for each in table.methods if each.label == label)
    entry = table.entries[label, budget][cost.key]
    shape = table.shape or dict.fromkeys(("prompt_tokens", "visual_tokens", "batch", "batch_prefill", "new_tokens"))
    return {
        **table.context,
        **{name: value for name, value in shape.items() if name != "dataset"},
        "reading": method.reading,
        "method": method.label,
        "base": method.base,
        "tuned": method.tuned,
        "parameters": method.parameters,
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
        LIMIT: table.limits.least.get((label, budget)) if table.limits and cost.key == TIMED else None,
    }

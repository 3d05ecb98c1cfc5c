"""Texts of tables: numbers, captions, and names of lines and cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.statistics.metric_kinds import CAPS
from mmkv_bench.tables.score_table import AXES, Line, ScoreTable

_UNITS = {"seconds": ((1.0, "s"), (1e-3, "ms")), "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))}


def score(value: float | None) -> str:
    """Format with two decimals, without a minus on zero; "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(value: float) -> str:
    """Format with two decimals and a sign; zero has no sign."""
    return score(value) if float(f"{value:.2f}") <= 0 else f"+{score(value)}"


def interval_text(low: float | None, high: float | None) -> str:
    """Format as `[0.71, 0.80]`; "" without an interval."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def ranks_text(ends: Iterable[float], form: str = "") -> str:
    """Format a rank or an interval of ranks: `2` or `2-5`."""
    return "-".join(dict.fromkeys(format(end, form) for end in ends))


def p_value(p: float) -> str:
    """Format with three decimals; `<0.001` for smaller values."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def number(value: float | None) -> str:
    """Format with three significant digits, never in powers of ten; whole numbers stay; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"


def number_span(low: float | None, high: float | None, size: float = 1.0) -> str:
    """Format as `[0.71, 0.8]` in units of `size`; "" without an interval, or if its ends are equal."""
    return "" if low is None or high is None or low == high else f"[{number(low / size)}, {number(high / size)}]"


def unit_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Return size and name of the largest unit (s or ms; GiB to B) in which the largest value is at least one.

    unit: unit of the rows; units other than seconds and bytes stay.
    """
    sizes = _UNITS.get(unit)
    if sizes is None:
        return 1.0, unit
    largest_value = max(values, default=0.0)
    return next((size for size in sizes if largest_value >= size[0]), sizes[-1])


# Context that a caption names only if it differs between tables; the value names what must be equal in these tables.
_WITHIN = {"model_fingerprint": "model", "dataset_fingerprint": "dataset"}
_QUIET = (*_WITHIN, "dtype", "attention", "generation", "numerics_version", "torch", "transformers")
_QUIET += ("device", "processor", "lmms_eval")


def caption(table: ScoreTable, tables: Sequence[ScoreTable], intervals: bool = True) -> str:
    """Return axis, model, protocol, reading, sample count, interval kind, and what distinguishes this table from the others."""
    contexts = [each.context for each in tables]
    parts = [axis_words(table.axis), *context_words(table.context, table.readings, contexts)]
    if table.mostly_free:
        parts.append("answers mostly free")
    parts.append(size_text(table))
    if table.metric in CAPS:
        parts.append(f"a sample counts for {CAPS[table.metric]:g} nats at most")
    kinds = sorted({entry.interval for entry in table.entries.values()} - {"none"})
    if intervals and kinds:
        parts.append(f"{LEVEL:.0%} intervals ({', '.join(kinds)})")
    return "; ".join(parts)


def axis_words(axis: str) -> str:
    """Describe the unit of a table's budgets."""
    return AXES[axis] if axis == "none" else f"budget: {AXES[axis]}"


def context_words(
    context: Mapping[str, str], readings: Sequence[str], contexts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return model, protocol, reading, and what distinguishes this context from `contexts`."""
    parts = [f"model={context['model']}", f"protocol={context['protocol']}"]
    if readings:
        parts.append(f"reading={' and '.join(readings)}")
    if context["limits"]:
        parts.append(context["limits"])
    for column in _QUIET:
        grouping_column = _WITHIN.get(column)
        comparable_contexts = [
            other for other in contexts if grouping_column is None or other[grouping_column] == context[grouping_column]
        ]
        if len({other[column] for other in comparable_contexts}) > 1:
            value = context[column]
            parts.append(f"{column}={value[:12] if grouping_column else value}")
    return parts


def size_text(table: ScoreTable) -> str:
    """Return `n=500`, or `n=300 to 500` if the cells have different numbers of samples."""
    low, high = table.sizes[0], table.sizes[-1]
    return f"n={low}" if low == high else f"n={low} to {high}"


def line_label(method: Line) -> str:
    """Return the method's name for the table. Append `ceiling` if the method cheats, `calibrated` if it reads a calibration, and
    `tuned` if its parameters are not the defaults."""
    flags = {"ceiling": method.cheats, "calibrated": method.calibrated, "tuned": method.tuned}
    flag_text = ", ".join(word for word, true in flags.items() if true)
    if not flag_text:
        return method.label
    return f"{method.label[:-1]}, {flag_text})" if method.label.endswith(")") else f"{method.label} ({flag_text})"


def cell_words(label: str, budget: str) -> str:
    """Describe a cell: `snapkv at 64`."""
    return f"{label} at {budget}" if budget else label

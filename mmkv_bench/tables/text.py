"""Texts of tables: numbers, captions, and names of lines and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.statistics.metric_kinds import CAPS
from mmkv_bench.tables.score_table import AXES, Line, ScoreTable

_UNITS = {"seconds": ((1.0, "s"), (1e-3, "ms")), "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))}


def score(value: float | None) -> str:
    """Two decimals, without a minus on zero; "-" for nothing."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(value: float) -> str:
    """Two decimals with a sign, but for zero."""
    return score(value) if float(f"{value:.2f}") <= 0 else f"+{score(value)}"


def interval_text(low: float | None, high: float | None) -> str:
    """`[0.71, 0.80]`, or "" without an interval."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def p_value(p: float) -> str:
    """Three decimals, or that it is smaller."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def number(value: float | None) -> str:
    """Three significant digits, never in powers of ten; whole numbers as they are; "-" for nothing."""
    if value is None:
        return "-"
    if value == 0 or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"


def number_span(low: float | None, high: float | None, size: float = 1.0) -> str:
    """`[0.71, 0.8]` in units of `size`; "" without an interval, and where nothing varies."""
    return "" if low is None or high is None or low == high else f"[{number(low / size)}, {number(high / size)}]"


def unit_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Size and name of the largest unit (s or ms; GiB to B) in which the largest value is one at least.

    unit: as the rows have it; any but seconds and bytes stays.
    """
    sizes = _UNITS.get(unit)
    if sizes is None:
        return 1.0, unit
    most = max(values, default=0.0)
    return next((size for size in sizes if most >= size[0]), sizes[-1])


# Context that a caption names only where it tells two tables apart, and what must be equal for it to do so.
_WITHIN = {"model_fingerprint": "model", "dataset_fingerprint": "dataset"}
_QUIET = (*_WITHIN, "dtype", "attention", "generation", "numerics_version", "torch", "transformers")
_QUIET += ("device", "processor", "lmms_eval")


def title(table: ScoreTable) -> str:
    """Dataset and metric."""
    return f"{table.dataset}, {table.metric}"


def caption(table: ScoreTable, tables: Sequence[ScoreTable], intervals: bool = True) -> str:
    """Axis, model, protocol, reading, sample count and interval kind, and what tells this table from the others."""
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
    """The unit of a table's budgets."""
    return AXES[axis] if axis == "none" else f"budget: {AXES[axis]}"


def context_words(
    context: Mapping[str, str], readings: Sequence[str], contexts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Model, protocol, reading, and what tells this context from the others that are shown with it."""
    parts = [f"model={context['model']}", f"protocol={context['protocol']}"]
    if readings:
        parts.append(f"reading={' and '.join(readings)}")
    if context["limits"]:
        parts.append(context["limits"])
    for column in _QUIET:
        within = _WITHIN.get(column)
        others = [other for other in contexts if within is None or other[within] == context[within]]
        if len({other[column] for other in others}) > 1:
            value = context[column]
            parts.append(f"{column}={value[:12] if within else value}")
    return parts


def size_text(table: ScoreTable) -> str:
    """`n=500`, or `n=300 to 500` where the cells hold different numbers of samples."""
    low, high = table.sizes[0], table.sizes[-1]
    return f"n={low}" if low == high else f"n={low} to {high}"


def line_label(method: Line) -> str:
    """The method's name in the table, with `ceiling` where it cheats, `calibrated` where it was measured on data before,
    and `tuned` where its parameters are not the defaults."""
    flags = {"ceiling": method.cheats, "calibrated": method.calibrated, "tuned": method.tuned}
    words = ", ".join(word for word, true in flags.items() if true)
    if not words:
        return method.label
    return f"{method.label[:-1]}, {words})" if method.label.endswith(")") else f"{method.label} ({words})"


def cell_words(label: str, budget: str) -> str:
    """A cell in words: `snapkv at 64`."""
    return f"{label} at {budget}" if budget else label

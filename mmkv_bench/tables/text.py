"""Texts of tables: numbers, captions, and names of lines and cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.statistics.metric_kinds import CAPS
from mmkv_bench.tables.score_table import AXES, Line, ScoreTable

_UNITS = {"seconds": ((1.0, "s"), (1e-3, "ms")), "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))}


def score(value: float | None) -> str:
    """Format a score with two decimals, without a minus on zero; "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(value: float) -> str:
    """Format a number with two decimals and a sign; zero has no sign."""
    return score(value) if float(f"{value:.2f}") <= 0 else f"+{score(value)}"


def interval_text(low: float | None, high: float | None) -> str:
    """Format an interval as `[0.71, 0.80]`; "" if an end is None."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def ranks_text(ends: Iterable[float], form: str = "") -> str:
    """Format a rank, or an interval of ranks, as `2` or `2-5`. form: format of a single number."""
    return "-".join(dict.fromkeys(format(end, form) for end in ends))


def p_value(p: float) -> str:
    """Format a p-value with three decimals; smaller ones are `<0.001`."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def number(value: float | None) -> str:
    """Format a number with three significant digits, never in powers of ten; whole numbers stay whole; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"


def number_span(low: float | None, high: float | None, size: float = 1.0) -> str:
    """Format an interval as `[0.71, 0.8]` in units of `size`; "" if an end is None or both are equal."""
    return "" if low is None or high is None or low == high else f"[{number(low / size)}, {number(high / size)}]"


def unit_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Return (size, name) of the largest unit (s or ms; GiB to B) in which the largest value is at least one.

    unit: unit of the values; units other than seconds and bytes are returned as they are.
    """
    sizes = _UNITS.get(unit)
    if sizes is None:
        return 1.0, unit
    largest_value = max(values, default=0.0)
    return next((size for size in sizes if largest_value >= size[0]), sizes[-1])


# Context that a caption names only if it differs between tables; the value names what must be equal in these tables.
_GROUPING_COLUMN_OF = {"model_fingerprint": "model", "dataset_fingerprint": "dataset"}
_HIDDEN_COLUMNS = (
    *_GROUPING_COLUMN_OF,
    "dtype",
    "attention",
    "generation",
    "numerics_version",
    "torch",
    "transformers",
)
_HIDDEN_COLUMNS += ("device", "processor", "lmms_eval")


def caption(table: ScoreTable, tables: Sequence[ScoreTable], intervals: bool = True) -> str:
    """Return the caption of a table: kind of budget, model, protocol, reading, number of samples and kind of intervals.

    It also has the settings in which this table differs from the others of `tables`.
    """
    contexts = [each.context for each in tables]
    caption_parts = [axis_words(table.axis), *context_words(table.context, table.readings, contexts)]
    if table.mostly_free:
        caption_parts.append("answers mostly free")
    caption_parts.append(size_text(table))
    if table.metric in CAPS:
        caption_parts.append(f"a sample counts for {CAPS[table.metric]:g} nats at most")
    kinds = sorted({entry.interval for entry in table.entries.values()} - {"none"})
    if intervals and kinds:
        caption_parts.append(f"{LEVEL:.0%} intervals ({', '.join(kinds)})")
    return "; ".join(caption_parts)


def axis_words(axis: str) -> str:
    """Return a text on the unit of a table's budgets, such as "budget: entries kept per KV head"."""
    return AXES[axis] if axis == "none" else f"budget: {AXES[axis]}"


def context_words(
    context: Mapping[str, str], readings: Sequence[str], contexts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return the caption parts of a context: model, protocol, reading, and the settings in which it differs from `contexts`."""
    context_texts = [f"model={context['model']}", f"protocol={context['protocol']}"]
    if readings:
        context_texts.append(f"reading={' and '.join(readings)}")
    if context["limits"]:
        context_texts.append(context["limits"])
    for column in _HIDDEN_COLUMNS:
        grouping_column = _GROUPING_COLUMN_OF.get(column)
        comparable_contexts = [
            other for other in contexts if grouping_column is None or other[grouping_column] == context[grouping_column]
        ]
        if len({other[column] for other in comparable_contexts}) > 1:
            value = context[column]
            context_texts.append(f"{column}={value[:12] if grouping_column else value}")
    return context_texts


def size_text(table: ScoreTable) -> str:
    """Return the table's number of samples as `n=500`, or `n=300 to 500` if its cells differ."""
    low, high = table.sizes[0], table.sizes[-1]
    return f"n={low}" if low == high else f"n={low} to {high}"


def line_label(method: Line) -> str:
    """Return a method's name for the table, with its properties in parentheses.

    These are `ceiling` if the method reads the full cache's answer, `calibrated` if it reads a calibration, and `tuned` if its
    parameters are not the defaults.
    """
    flags = {"ceiling": method.cheats, "calibrated": method.calibrated, "tuned": method.tuned}
    flag_text = ", ".join(word for word, true in flags.items() if true)
    if not flag_text:
        return method.label
    return f"{method.label[:-1]}, {flag_text})" if method.label.endswith(")") else f"{method.label} ({flag_text})"


def cell_words(label: str, budget: str) -> str:
    """Return the name of a table cell: `snapkv at 64`, or only the method without a budget."""
    return f"{label} at {budget}" if budget else label

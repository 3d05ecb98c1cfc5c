"""Texts of tables: numbers, captions, and names of lines and cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.statistics.metric_kinds import CAPS
from mmkv_bench.tables.score_table import AXES, Line, ScoreTable

_UNITS = {"seconds": ((1.0, "s"), (1e-3, "ms")), "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))}


def score(value: float | None) -> str:
    """Format a score with two decimals ("0.00" instead of "-0.00"); "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed_score(value: float) -> str:
    """Format a number with two decimals and a sign; zero has no sign."""
    return score(value) if float(f"{value:.2f}") <= 0 else f"+{score(value)}"


def interval_text(low: float | None, high: float | None) -> str:
    """Format an interval with two decimals, as `[0.71, 0.80]`; "" if an end is None."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def ranks_text(ends: Iterable[float], form: str = "") -> str:
    """Format an interval of ranks as `2-5`, or as `2` if both ends look equal. form: format specification of one end."""
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
    """Divide both ends by `size` and format them with `number`, as `[0.71, 0.8]`; "" if an end is None or both are equal."""
    return "" if low is None or high is None or low == high else f"[{number(low / size)}, {number(high / size)}]"


def unit_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Return (size, name) of the unit to print `values` in: the largest in which the largest value is at least one.

    unit: unit of `values`. "seconds" become s or ms, "bytes" become GiB, MiB, KiB or B; others stay, with size 1.
    """
    sizes = _UNITS.get(unit)
    if sizes is None:
        return 1.0, unit
    largest_value = max(values, default=0.0)
    return next((size for size in sizes if largest_value >= size[0]), sizes[-1])


# A fingerprint is named only if tables of the same model, or of the same dataset, differ in it.
_GROUPING_COLUMN_OF = {"model_fingerprint": "model", "dataset_fingerprint": "dataset"}
# A caption names these only if they differ between tables.
_HIDDEN_COLUMNS = (
    *_GROUPING_COLUMN_OF,
    "dtype",
    "attention",
    "generation",
    "numerics_version",
    "torch",
    "transformers",
    "device",
    "processor",
    "lmms_eval",
)


def caption(table: ScoreTable, tables: Sequence[ScoreTable], intervals: bool = True) -> str:
    """Return the caption: kind of budget, model, protocol, reading (`paper` or `released` rules of methods), number of samples,
    kind of intervals, and the settings in which `table` differs from the other `tables`."""
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
    """Return the caption's words on the unit of budgets. axis: a key of `AXES`."""
    return AXES[axis] if axis == "none" else f"budget: {AXES[axis]}"


def context_words(
    context: Mapping[str, str], readings: Sequence[str], contexts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return the caption's words on model, protocol, readings, limits of the prompt and settings that differ in `contexts`."""
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
    """Return the number of samples as `n=500`, or as `n=300 to 500` if it differs between the table's cells."""
    low, high = table.sizes[0], table.sizes[-1]
    return f"n={low}" if low == high else f"n={low} to {high}"


def line_label(method: Line) -> str:
    """Return a line's label with these words in parentheses: `ceiling` if the method reads the full cache's answer,
    `calibrated` if the method reads a calibration, `tuned` if parameters differ from the defaults."""
    flags = {"ceiling": method.cheats, "calibrated": method.calibrated, "tuned": method.tuned}
    flag_text = ", ".join(word for word, true in flags.items() if true)
    if not flag_text:
        return method.label
    return f"{method.label[:-1]}, {flag_text})" if method.label.endswith(")") else f"{method.label} ({flag_text})"


def cell_words(label: str, budget: str) -> str:
    """Return `snapkv at 64`, or only the label if the method has no budget."""
    return f"{label} at {budget}" if budget else label

"""Captions of tables, and the names of their lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.statistics.metric_kinds import CAPS
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.score_table import AXES, ScoreTable

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

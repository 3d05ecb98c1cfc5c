"""A forecast as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.text_columns import align_columns, size

if TYPE_CHECKING:
    from mmkv_bench.forecast.forecast import Assumptions, BudgetForecast, DatasetForecast, Forecast

GIB = 2**30
_SOURCES = {
    "given": "--prompt-tokens",
    "lengths": "lengths",
    "pictures": "--image and a question",
    "stored": "median of stored answers",
    "pages": "size of its pages",
    "picture": "one image, question assumed",
    "dataset": "as the dataset's file states, question assumed",
    "assumed": "assumed, data not opened; --prompt-tokens sets it",
}
_SCOPE_CLAUSES = {"model": " (after the last layer)", "stream": " (stream)"}
_MEANING = (
    "Lower bounds by arithmetic: a step reads weights and kept entries once, the prefill holds one MLP's activations. Vision",
    "tower, attention and a method's own tensors come on top (--memory counts them). kept: entries per KV head; max batch:",
    "sequences for which the device has what is needed.",
)


_BOUNDS = (
    "Forecasts are bounds: a step reads weights and kept entries once, the prefill holds one MLP's activations. Vision tower,",
    "attention and a method's own tensors come on top: --memory counts them, and the run measures everything.",
)


def text(forecast: Forecast, tables: str | None = None) -> str:
    """Return a forecast as text: the device, a table per group of datasets with equal numbers, and notes.

    tables: text to print in place of these tables.
    """
    assumptions = forecast.given
    lines = [f"device     {_device(assumptions)}"] if forecast.read is not None else []
    sections = [_section(datasets, assumptions) for datasets in _groups_of_equal_tables(forecast.datasets)]
    if tables is not None:
        lines += ["", tables, *(f"{prompts}; {hours.strip()}" for prompts, *_, hours in sections)]
    else:
        lines += [line for section in sections for line in ("", *section)]
    if forecast.datasets:
        lines += ["", *(_MEANING if tables is None else _BOUNDS)]
    lines += ["", *(f"note       {sentence}" for sentence in forecast.missing)] if forecast.missing else []
    return "\n".join(lines)


def _groups_of_equal_tables(datasets: Sequence[DatasetForecast]) -> list[list[DatasetForecast]]:
    groups: list[list[DatasetForecast]] = []
    for one in datasets:
        group_of_equal_tables = next((group for group in groups if _table(group[0]) == _table(one)), None)
        if group_of_equal_tables is None:
            groups.append([one])
        else:
            group_of_equal_tables.append(one)
    return groups


def _table(one: DatasetForecast) -> tuple[Any, ...]:
    return one.tokens, one.source, one.new_tokens, one.sequences, one.lines


def _device(given: Assumptions) -> str:
    device_facts = [
        None if given.memory is None else f"{given.memory / GIB:,.4g} GiB",
        None if given.bandwidth is None else f"reads {given.bandwidth / 1e9:,.4g} GB/s",
        None if given.rate is None else f"{given.rate / 1e12:,.4g} TFLOP/s",
    ]
    device_text = ", ".join(fact for fact in device_facts if fact) or "unknown"
    return f"{given.device}: {device_text}" if given.device else device_text


def _section(datasets: Sequence[DatasetForecast], given: Assumptions) -> list[str]:
    first_dataset = datasets[0]
    answer_clause = (
        "answers of unknown length"
        if first_dataset.new_tokens is None
        else f"answers of at most {first_dataset.new_tokens:,} tokens"
    )
    batch = f", {first_dataset.sequences} at a time" if first_dataset.sequences > 1 else ""
    labels = ", ".join(dataset.dataset for dataset in datasets)
    headings = ["budget", "methods", "kept", "of prompt", "KV", "step reads", "ms/step", "speed-up", "needs"]
    headings += [] if given.memory is None else ["max batch", f"on {given.memory / GIB:,.4g} GiB"]
    table = align_columns(headings, [_row(line, first_dataset.tokens, given) for line in first_dataset.lines], words=2)
    prompts = f"{labels}: prompts of {first_dataset.tokens:,} tokens ({_SOURCES[first_dataset.source]}){batch}, {answer_clause}"
    hours_clause = f", all {len(datasets)} together" if len(datasets) > 1 else ""
    return [prompts, *table, f"  time at least{hours_clause}: {_hours(datasets)}"]


def _row(line: BudgetForecast, tokens: int, given: Assumptions) -> list[str]:
    methods = ", ".join(line.methods[:3]) + (f" and {len(line.methods) - 3} more" if len(line.methods) > 3 else "")
    cells = [
        line.label,
        methods + _SCOPE_CLAUSES.get(line.scope, ""),
        f"{line.kept:,}",
        f"{line.kept / tokens:.1%}",
        size(line.kv),
        size(line.read),
        "?" if line.ms is None else f"{line.ms:.3g}",
        f"{line.speed_up:.2f}x",
        size(line.needs),
    ]
    if given.memory is not None:
        fit_clause = "may fit" if line.needs <= given.memory else f"{size(line.needs - given.memory)} too many"
        cells += [f"{line.batch:,}", fit_clause]
    return cells


def _hours(datasets: Sequence[DatasetForecast]) -> str:
    prefill = _sum([one.prefill_hours for one in datasets], "--matmul TFLOP/s")
    decode = _sum(
        [one.decode_hours for one in datasets], "--bandwidth GB/s" if datasets[0].new_tokens else "no answer length"
    )
    return f"prefills {prefill}, decoding {decode}"


def _sum(hours: Sequence[float | None], needs: str) -> str:
    known_hours = [one for one in hours if one is not None]
    return duration(sum(known_hours)) if len(known_hours) == len(hours) else f"unknown ({needs})"


def duration(hours: float) -> str:
    """Format hours: `2.5 h`, `4.1 min`."""
    return f"{hours:.3g} h" if hours >= 0.1 else f"{hours * 60:.2g} min"

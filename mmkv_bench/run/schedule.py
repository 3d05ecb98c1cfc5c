"""The schedule of a plan for `mmkv-bench plan`: its model, then rows done and missing by dataset and method."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mmkv_bench.run.card import columns, model_lines, row_lines, wrapped
from mmkv_bench.text_columns import aligned

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import Coverage, DatasetShare, Plan

_HEADS = ("method", "reading", "budgets", "seeds", "protocols", "cells", "rows", "done", "failed", "missing")
_COUNTED = {"documented": " as documented", "unknown": ", an unknown number"}


def text(plan: Plan, coverage: Coverage) -> str:
    """Return the model and one table per group of datasets with equal counts. coverage: which rows of the plan are stored."""
    done = {part.dataset: coverage.count(part) for part in plan.parts}
    tables: dict[tuple[str, tuple[tuple[str, ...], ...]], list[str]] = {}
    for part in plan.parts:
        samples = f"{len(part.samples)} samples{_COUNTED.get(part.counted, '')}, {coverage.missing(part)} with missing answers"
        tables.setdefault((samples, _methods(part, coverage)), []).append(part.dataset)
    lines = [wrapped([*model_lines(plan), *row_lines(plan, done)], columns(sys.stdout))]
    for (samples, methods), datasets in tables.items():
        each = "each " if len(datasets) > 1 else ""
        table = aligned(_HEADS, methods, words=_HEADS.index("cells"))
        lines += ["", f"{', '.join(datasets)}: {each}{samples}", *table]
    return "\n".join(lines)


def document(plan: Plan, coverage: Coverage) -> dict[str, Any]:
    """Return the schedule as data: datasets with their cells and counts, and the notes."""
    return {
        "out": str(plan.out),
        "model": plan.model.name,
        "notes": list(plan.notes),
        "datasets": [_dataset(part, coverage) for part in plan.parts],
    }


def _dataset(part: DatasetShare, coverage: Coverage) -> dict[str, Any]:
    answered, statuses = coverage.answered(part), coverage.statuses(part)
    cells = zip(part.cells, answered.sum(1).tolist(), (statuses > 0).sum(1).tolist(), strict=True)
    return {
        "dataset": part.dataset,
        "samples": len(part.samples),
        "counted": part.counted,
        "missing": coverage.missing(part),
        "cells": [
            {"cell": cell.cell, "label": cell.label, "done": done, "failed": failed} for cell, done, failed in cells
        ],
    }


def _methods(part: DatasetShare, coverage: Coverage) -> tuple[tuple[str, ...], ...]:
    """Return one table line per method and reading (a paper's text or its released code), with sums of cells and rows."""
    answered, statuses = coverage.answered(part), coverage.statuses(part)
    groups: dict[tuple[str, str | None], list[int]] = {}
    for place, cell in enumerate(part.cells):
        groups.setdefault((cell.method, cell.reading), []).append(place)
    lines = []
    for (method, reading), places in groups.items():
        cells = [part.cells[place] for place in places]
        done, failed = int(answered[places].sum()), int((statuses[places] > 0).sum())
        rows = len(cells) * len(part.samples)
        varied = (_among(getattr(cell, name) for cell in cells) for name in ("budget", "seed", "protocol"))
        lines.append((method, reading or "-", *varied, *map(str, (len(cells), rows, done, failed, rows - done))))
    return tuple(lines)


def _among(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "-"

"""What `mmkv-bench plan` prints: the card of a plan, then its cells by dataset and method, with what there is of each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.columns import aligned
from mmkv_bench.run.card import columns, render
from mmkv_bench.run.preview import card_facts

if TYPE_CHECKING:
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.coverage import Standing
    from mmkv_bench.plan.parts import Part
    from mmkv_bench.plan.plan import Plan

_HEADS = ("method", "reading", "budgets", "seeds", "protocols", "cells", "rows", "done", "failed", "missing")
_COUNTED = {"documented": " as documented", "unknown": ", an unknown number"}


def outlined(plan: Plan, standing: Standing) -> str:
    """The text; `standing` is what there is in the plan's folder."""
    done = {part.dataset: standing.count(part) for part in plan.parts}
    lines = [render(card_facts(plan, done, {}, None), columns(sys.stdout))]
    for part in plan.parts:
        samples = f"{len(part.samples)} samples{_COUNTED.get(part.counted, '')}"
        lines += [
            "",
            f"{part.dataset}: {samples}, {standing.missing(part)} of them to ask",
            *aligned(_HEADS, _methods(part, standing), words=_HEADS.index("cells")),
        ]
    return "\n".join(lines)


def document(plan: Plan, standing: Standing) -> dict[str, Any]:
    """The same as data: datasets with their cells and counts, and the notes."""
    return {
        "out": str(plan.out),
        "model": plan.config.model.name,
        "notes": list(plan.notes),
        "datasets": [_dataset(part, standing) for part in plan.parts],
    }


def _dataset(part: Part, standing: Standing) -> dict[str, Any]:
    answered, statuses = standing.answered(part), standing.statuses(part)
    cells = zip(part.cells, answered.sum(1).tolist(), (statuses > 0).sum(1).tolist(), strict=True)
    return {
        "dataset": part.dataset,
        "samples": len(part.samples),
        "counted": part.counted,
        "missing": standing.missing(part),
        "cells": [
            {"cell": cell.cell, "label": cell.label, "done": done, "failed": failed} for cell, done, failed in cells
        ],
    }


def _methods(part: Part, standing: Standing) -> list[tuple[str, ...]]:
    """One line per method and reading, its cells and rows added up."""
    answered, statuses = standing.answered(part), standing.statuses(part)
    groups: dict[tuple[str, str | None], list[int]] = {}
    for place, cell in enumerate(part.cells):
        groups.setdefault((cell.method, cell.reading), []).append(place)
    lines = []
    for (method, reading), places in groups.items():
        cells = [part.cells[place] for place in places]
        done, failed = int(answered[places].sum()), int((statuses[places] > 0).sum())
        rows = len(cells) * len(part.samples)
        counts = (len(cells), rows, done, failed, rows - done)
        lines.append((method, reading or "-", *_varied(cells), *map(str, counts)))
    return lines


def _varied(cells: Sequence[Cell]) -> tuple[str, str, str]:
    """Budgets, seeds and protocols of a method's cells."""
    return (
        _among(cell.budget for cell in cells),
        _among(cell.seed for cell in cells),
        _among(cell.protocol for cell in cells),
    )


def _among(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "-"

"""Cells that a store holds of other versions: the same method on the same data, whose answers are not this version's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import Plan
    from mmkv_bench.store.store import Store

_ASKED = (
    "model",
    "dataset",
    "method",
    "base",
    "reading",
    "protocol",
    "budget_kind",
    "budget_entries",
    "budget_fraction",
    "seed",
    "parameters",
    "dtype",
    "attention",
    "generation",
)
_VERSIONS = ("torch", "transformers", "numerics_version", "method_version")


def other_versions(plan: Plan, store: Store) -> list[str]:
    """A sentence where cells of the plan, asked for alike, were made by other versions and have no answer of this one's."""
    asked: dict[tuple[Any, ...], Any] = {tuple(cell.row()[name] for name in _ASKED): cell for cell in plan.cells}
    stored = store.cells(columns=("cell", *_ASKED, *_VERSIONS)).to_pylist()
    here = {row["cell"] for row in stored}
    older: set[str] = set()
    changes: dict[str, None] = {}
    for row in stored:
        cell = asked.get(tuple(row[name] for name in _ASKED))
        if cell is None or cell.cell in here:
            continue
        own = cell.row()
        differing = [name for name in _VERSIONS if row[name] != own[name]]
        if differing:
            older.add(cell.cell)
            changes |= dict.fromkeys(f"{name} {row[name] or 1} for {own[name] or 1}" for name in differing)
    if not older:
        return []
    return [
        f"{len(older)} of the {len(plan.cells)} cells have rows of another version in {store.root} ({', '.join(changes)}): "
        "answers of two versions make no cell, so those rows stay and these cells run beside them; `plan` says how many samples "
        "that is, and another folder (out=) keeps them apart"
    ]

"""Stored answers that do not belong to a plan: answers to changed prompts, and answers of other versions.

The hash of a cell (one method at one budget on one dataset) covers the dataset's rows, but not the files that rows name
by path. For such files, each response has a `prompt_hash`. `retry=[changed]` answers changed prompts again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.config.schema import CHANGED
from mmkv_bench.errors import ConfigError
from mmkv_bench.evaluation.documents import sample_refs
from mmkv_bench.evaluation.fingerprints import rows_hold_media
from mmkv_bench.evaluation.generating import prompt_hashes
from mmkv_bench.store.schema import IDENTITY

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import DatasetShare, Plan
    from mmkv_bench.store.store import Store

Samples = dict[str, set[str]]
"""Cell -> ids of samples."""

_SHOWN_IDS = 3


def changed_answers(plan: Plan, store: Store) -> tuple[Samples, list[str]]:
    """Find stored answers of a plan's datasets whose prompts have changed since.

    Returns:
        The answers that this run must generate again, of any shard: cell to sample ids.
        Notes about such answers in other cells, which the run leaves as they are.

    Raises ConfigError: `retry` or `limit` leave out changed answers of the plan, or files of prompts cannot be read.
    """
    changed_samples_by_cell: Samples = {}
    notes = []
    for part in plan.parts:
        if rows_hold_media(part.spec):
            continue
        plan_cells = [cell.cell for cell in part.cells]
        checked_cells = [*plan_cells, *_other_cells_with_same_prompts(store, part)]
        changed_rows, unreadable_rows = differing_prompts(store, part, checked_cells, plan.limit)
        is_in_plan = _is_in_cells(changed_rows, plan_cells)
        changed_in_plan, changed_elsewhere = changed_rows.filter(is_in_plan), changed_rows.filter(pc.invert(is_in_plan))
        unreadable_rows = unreadable_rows.filter(_is_in_cells(unreadable_rows, plan_cells))
        if unreadable_rows.num_rows:
            raise ConfigError(
                f"{_count_text(unreadable_rows)} of {part.dataset} cannot be checked, because files of their prompts "
                "cannot be read; "
                f"restore the files, or print the rows as they are: python -m mmkv_bench tables {store.root}"
            )
        if changed_in_plan.num_rows:
            _require_retry(plan, part, changed_in_plan)
        if changed_elsewhere.num_rows:
            notes.append(
                f"{_count_text(changed_elsewhere)} of {part.dataset} in cells that are not of this run are for files "
                "that have changed since; "
                f"tables of the folder mix both until these cells run with retry=[{CHANGED}] too"
            )
        for cell, sample in zip(
            changed_in_plan["cell"].to_pylist(), changed_in_plan["sample_id"].to_pylist(), strict=True
        ):
            changed_samples_by_cell.setdefault(cell, set()).add(sample)
    return changed_samples_by_cell, notes


def _other_cells_with_same_prompts(store: Store, part: DatasetShare) -> list[str]:
    """Return a store's cells outside of the plan that have the same prompts as the dataset's cells in the plan."""
    plan_cells = {cell.cell for cell in part.cells}
    label_and_fingerprint = part.dataset, part.cells[0].dataset_fingerprint
    other_cells = []
    for row in store.cells(columns=("cell", "dataset", "dataset_fingerprint", "config")).to_pylist():
        if row["cell"] not in plan_cells and (row["dataset"], row["dataset_fingerprint"]) == label_and_fingerprint:
            node = json.loads(row["config"])["datasets"].get(part.dataset) or {}
            if (node.get("placeholders") or "keep") == (part.spec.placeholders or "keep"):
                other_cells.append(row["cell"])
    return other_cells


def _is_in_cells(rows: pa.Table, cells: Sequence[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["cell"], pa.array(cells, pa.string()))


def _require_retry(plan: Plan, part: DatasetShare, changed: pa.Table) -> None:
    is_retried = CHANGED in plan.retry and plan.stage != "score"
    if is_retried and (plan.limit is None or pc.max(changed["doc_id"]).as_py() < plan.limit):
        return
    limit_hint = f" (without limit={plan.limit}, which leaves some of them out)" if is_retried else ""
    raise ConfigError(
        f"{_count_text(changed)} of {part.dataset} are for other prompts than the present ones, because pictures, "
        "videos or other files of the dataset have changed; "
        f"retry=[{CHANGED}] answers these samples again{limit_hint}; run with it, "
        "or restore the files, or give another folder (out=<folder>)"
    )


def differing_prompts(
    store: Store, part: DatasetShare, cells: Sequence[str], limit: int | None
) -> tuple[pa.Table, pa.Table]:
    """Compare the prompts of stored answers with the present ones by their hash.

    Return two tables: answers whose prompts have changed, and answers whose prompts cannot be made.

    limit: number of the dataset's samples to open, raised to include all stored answers; None opens all.
    """
    rows = store.responses(cells, ("cell", "sample_id", "doc_id", "prompt_hash")).combine_chunks()
    rows = rows.filter(pc.not_equal(pc.coalesce(rows["prompt_hash"], ""), ""))
    if not rows.num_rows:
        return rows, rows
    documents_reached = pc.max(rows["doc_id"]).as_py() + 1
    limit = limit if limit is None or documents_reached <= limit else documents_reached
    rows = rows.filter(pc.less(rows["doc_id"], len(sample_refs(part.spec, limit))))
    doc_ids = pc.unique(rows["doc_id"])
    present_hashes = prompt_hashes(part.spec, doc_ids.to_pylist(), limit, anew=True)
    hash_of_document = pa.array([present_hashes[doc_id] for doc_id in doc_ids.to_pylist()], pa.string())
    present_hash_of_row = hash_of_document.take(pc.index_in(rows["doc_id"], doc_ids).combine_chunks())
    is_unreadable = pc.equal(present_hash_of_row, "")
    is_changed = pc.and_(pc.invert(is_unreadable), pc.not_equal(rows["prompt_hash"], present_hash_of_row))
    return rows.filter(is_changed), rows.filter(is_unreadable)


def _count_text(rows: pa.Table) -> str:
    sample_ids = sorted(set(rows["sample_id"].to_pylist()))
    shown_ids = ", ".join(sample_ids[:_SHOWN_IDS]) + (", ..." if len(sample_ids) > _SHOWN_IDS else "")
    return f"{rows.num_rows} stored answers to {len(sample_ids)} samples ({shown_ids})"


# ---------------------------------------------------------------------- other versions
_CELL_COLUMNS = (*IDENTITY, "budget_entries", "budget_fraction", "parameters", "generation")
_VERSION_COLUMNS = ("torch", "transformers", "numerics_version", "method_version")


def other_versions(plan: Plan, store: Store) -> list[str]:
    """Return a note if a store lacks cells of the plan but has them in another version; else nothing."""
    cell_by_values: dict[tuple[Any, ...], Any] = {
        tuple(cell.row()[name] for name in _CELL_COLUMNS): cell for cell in plan.cells
    }
    stored_cells = store.cells(columns=("cell", *_CELL_COLUMNS, *_VERSION_COLUMNS)).to_pylist()
    stored_names = {row["cell"] for row in stored_cells}
    other_version_labels: set[str] = set()
    version_changes: dict[str, None] = {}
    for row in stored_cells:
        cell = cell_by_values.get(tuple(row[name] for name in _CELL_COLUMNS))
        if cell is None or cell.cell in stored_names:
            continue
        plan_row = cell.row()
        differing_columns = [name for name in _VERSION_COLUMNS if row[name] != plan_row[name]]
        if differing_columns:
            other_version_labels.add(cell.cell)
            version_changes |= dict.fromkeys(
                f"{name} {row[name] or 1} for {plan_row[name] or 1}" for name in differing_columns
            )
    if not other_version_labels:
        return []
    return [
        f"{len(other_version_labels)} of the {len(plan.cells)} cells have rows of another version in "
        f"{store.root} ({', '.join(version_changes)}): "
        "answers of two versions never share a cell, so those rows stay and these cells run anew; `plan` says how many samples "
        "that is, and out=<another folder> keeps them apart"
    ]

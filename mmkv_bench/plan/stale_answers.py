"""Stored answers that do not belong to a plan: for prompts that have changed, and in cells of other versions.

A dataset's fingerprint, and so a cell's hash, covers the dataset's rows. Files that rows name by path are covered by the
`prompt_hash` of each response. Answers to two versions of a picture must not share a cell: `retry=[changed]` makes these again.
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

_NAMED = 3


def changed_answers(plan: Plan, store: Store) -> tuple[Samples, list[str]]:
    """Find stored answers of a plan's cells whose prompts have changed since, because a picture or a text file did.

    Returns:
        The answers that this run must generate again, of any shard: cell to sample ids.
        Notes about such answers in other cells, which the run leaves unchanged.

    Raises ConfigError: there are answers to other prompts, and `retry` does not include them or the limit leaves them out.
    """
    found: Samples = {}
    notes = []
    for part in plan.parts:
        if rows_hold_media(part.spec):
            continue
        own = [cell.cell for cell in part.cells]
        changed, unreadable = differing_prompts(store, part, [*own, *_beside(store, part)], plan.limit)
        mine, others = changed.filter(_of(changed, own)), changed.filter(pc.invert(_of(changed, own)))
        unreadable = unreadable.filter(_of(unreadable, own))
        if unreadable.num_rows:
            raise ConfigError(
                f"{_counted(unreadable)} of {part.dataset} cannot be checked, because files of their prompts cannot be read; "
                f"restore the files, or print the rows as they are: python -m mmkv_bench tables {store.root}"
            )
        if mine.num_rows:
            _require_retry(plan, part, mine)
        if others.num_rows:
            notes.append(
                f"{_counted(others)} of {part.dataset} in cells that are not of this run are for files that have changed since; "
                f"tables of the folder mix both until these cells run with retry=[{CHANGED}] too"
            )
        for cell, sample in zip(mine["cell"].to_pylist(), mine["sample_id"].to_pylist(), strict=True):
            found.setdefault(cell, set()).add(sample)
    return found, notes


def _beside(store: Store, part: DatasetShare) -> list[str]:
    """Return the cells of a store that are not part of the plan but have the same prompts as the dataset's cells in the plan."""
    ours = {cell.cell for cell in part.cells}
    data = part.dataset, part.cells[0].dataset_fingerprint
    others = []
    for row in store.cells(columns=("cell", "dataset", "dataset_fingerprint", "config")).to_pylist():
        if row["cell"] not in ours and (row["dataset"], row["dataset_fingerprint"]) == data:
            node = json.loads(row["config"])["datasets"].get(part.dataset) or {}
            if (node.get("placeholders") or "keep") == (part.spec.placeholders or "keep"):
                others.append(row["cell"])
    return others


def _of(rows: pa.Table, cells: Sequence[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["cell"], pa.array(cells, pa.string()))


def _require_retry(plan: Plan, part: DatasetShare, changed: pa.Table) -> None:
    again = CHANGED in plan.retry and plan.stage != "score"
    if again and (plan.limit is None or pc.max(changed["doc_id"]).as_py() < plan.limit):
        return
    limit_hint = f" (without limit={plan.limit}, which leaves some of them out)" if again else ""
    raise ConfigError(
        f"{_counted(changed)} of {part.dataset} are for other prompts than the present ones, because pictures, "
        "videos or other files of the dataset have changed; "
        f"retry=[{CHANGED}] answers these samples again{limit_hint}; run with it, "
        "or restore the files, or give another folder (out=<folder>)"
    )


def differing_prompts(
    store: Store, part: DatasetShare, cells: Sequence[str], limit: int | None
) -> tuple[pa.Table, pa.Table]:
    """Make the prompts of stored answers again and compare them with the stored `prompt_hash`.

    Return two tables: the answers whose prompts have changed, and those whose prompts cannot be made again.

    limit: only the dataset's first `limit` samples are compared; None compares all.
    """
    rows = store.responses(cells, ("cell", "sample_id", "doc_id", "prompt_hash")).combine_chunks()
    rows = rows.filter(pc.not_equal(pc.coalesce(rows["prompt_hash"], ""), ""))
    if not rows.num_rows:
        return rows, rows
    reach = pc.max(rows["doc_id"]).as_py() + 1
    limit = limit if limit is None or reach <= limit else reach
    rows = rows.filter(pc.less(rows["doc_id"], len(sample_refs(part.spec, limit))))
    doc_ids = pc.unique(rows["doc_id"])
    now = prompt_hashes(part.spec, doc_ids.to_pylist(), limit, anew=True)
    hashes = pa.array([now[doc_id] for doc_id in doc_ids.to_pylist()], pa.string())
    expected = hashes.take(pc.index_in(rows["doc_id"], doc_ids).combine_chunks())
    gone = pc.equal(expected, "")
    other = pc.and_(pc.invert(gone), pc.not_equal(rows["prompt_hash"], expected))
    return rows.filter(other), rows.filter(gone)


def _counted(rows: pa.Table) -> str:
    names = sorted(set(rows["sample_id"].to_pylist()))
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{rows.num_rows} stored answers to {len(names)} samples ({shown})"


# ---------------------------------------------------------------------- other versions
_ASKED = (*IDENTITY, "budget_entries", "budget_fraction", "parameters", "generation")
_VERSIONS = ("torch", "transformers", "numerics_version", "method_version")


def other_versions(plan: Plan, store: Store) -> list[str]:
    """Return a note if the plan's cells have no answers but the store has the same cells of another version; else nothing."""
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
        "answers of two versions never share a cell, so those rows stay and these cells run anew; `plan` says how many samples "
        "that is, and out=<another folder> keeps them apart"
    ]

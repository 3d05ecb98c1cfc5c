"""Stored divisions of a method's budget among layers and heads on real prompts. With random weights its own would be
noise.

`responses.kept` has the entries of every layer and KV head, so head-adaptive methods are covered too. Of a cell's rows
only the one with the median padding is used. A mean of all rows would be more even than any prompt, and hide the
padding of ragged heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.compression.allocators.replayed import Replayed
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.store.files import canonical_json, checksum
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    from mmkv_bench.families.facts import ModelFacts
    from mmkv_bench.plan.cells import Cell

_MATCHING_COLUMNS = (
    "base",
    "reading",
    "protocol",
    "budget_kind",
    "budget_entries",
    "budget_fraction",
    "method_version",
)
"""Columns that must be equal in a cell and in the stored cell, in addition to the parameters."""


@dataclass(frozen=True)
class Profile:
    """Division of one stored answer's budget among layers and KV heads.

    Attributes:
        kept: kept entries, `[layers][KV heads]`.
        entries: budget of the row's prompt, in entries per KV head.
        tokens: length of this prompt.
        cell, sample, model, dataset: cell and sample of the row, model and dataset of the cell.
    """

    kept: tuple[tuple[int, ...], ...]
    entries: int
    tokens: int
    cell: str
    sample: str
    model: str
    dataset: str

    @property
    def digest(self) -> str:
        """Digest of the division, independent of where the row is stored."""
        return checksum(canonical_json([self.cell, self.sample, self.entries, self.kept]).encode())

    def __str__(self) -> str:
        return f"{self.model} on {self.dataset}, sample {self.sample} of {self.tokens} tokens"


def with_profile(cell: Cell, folder: str, family: ModelFacts) -> tuple[Cell, Profile]:
    """Return the cell with its budget divided among layers and heads as in a stored row, and that division.

    Call `refuse_unprofiled` before. folder: store with the rows.

    Raises ConfigError: no store, or no row that matches the cell.
    """
    profile = _profile(cell, folder, family)
    compressor = cell.compressor
    assert compressor.allocator is not None, "a division is an allocator's"
    allocator = Replayed(compressor.allocator, profile.kept, profile.entries)
    profile_entry = {"profile": {name: value for name, value in vars(profile).items() if name != "kept"}}
    return replace(
        cell,
        cell=checksum(f"{cell.cell}/{profile.digest}".encode()),
        compressor=replace(compressor, allocator=allocator),
        calibrations={**cell.calibrations, profile.digest: profile_entry},
    ), profile


def refuse_unprofiled(cell: Cell) -> None:
    """Raise UnsupportedError for a method whose stored rows do not determine how it divides the budget."""
    decoding = cell.compressor.decoding
    if decoding is not None and decoding.retrieves:
        raise UnsupportedError(
            f"method {cell.method} is not timed with random weights, even with profiles: rows have the number of "
            "entries that each head reads (kept), but not which heads are dynamic, which decides what is "
            "fetched; allowed: real weights (model.weights=<folder>); give them, or leave the method out"
        )
    if hasattr(decoding, "allocator"):
        raise UnsupportedError(
            f"method {cell.method} ({cell.reading}) divides its budget inside a decode step, but rows only have "
            "the entries before that step; use reading=paper, or leave the method out"
        )


def _profile(cell: Cell, folder: str, family: ModelFacts) -> Profile:
    root, shape = Path(folder).expanduser(), (family.num_layers, family.num_kv_heads)
    if not root.is_dir():
        raise ConfigError(f"profiles={folder} is not a folder; give the folder of a run's rows (its out=...)")
    store = Store(root)
    matching_cells = {row["cell"]: row for row in store.cells().to_pylist() if _matches(row, cell)}
    columns = ("cell", "sample_id", "status", "kept", "budget_entries", "context_tokens")
    rows = _evicting_rows(store.responses(matching_cells, columns), shape)
    if not rows.num_rows:
        findings = "no such rows"
        if matching_cells:
            shape_text = f"{shape[0]} layers of {shape[1]} KV heads"
            findings = (
                f"{len(matching_cells)} such cells, but no row with {shape_text} and a prompt longer than the budget"
            )
        raise ConfigError(
            f"profiles={folder} needs rows of {cell.label} with the same parameters on real weights, but has {findings}; "
            "make such rows with scenario=quality, or leave the method out"
        )
    return _median(rows, matching_cells, shape)


def _matches(row: dict[str, Any], cell: Cell) -> bool:
    matches_columns = all(row[name] == getattr(cell, name) for name in _MATCHING_COLUMNS)
    return (
        matches_columns and row["weights"] != "random" and json.loads(row["parameters"]) == json.loads(cell.parameters)
    )


def _evicting_rows(rows: pa.Table, shape: tuple[int, int]) -> pa.Table:
    """Return the rows with status ok, a prompt longer than the budget, and this shape (layers, KV heads)."""
    is_evicted = pc.and_(pc.equal(rows["status"], "ok"), pc.less(rows["budget_entries"], rows["context_tokens"]))
    rows = rows.filter(pc.fill_null(is_evicted, False))
    rows = rows.filter(pc.equal(pc.list_value_length(rows["kept"]), shape[0]))
    if not rows.num_rows:
        return rows
    return rows.filter(pc.equal(pc.list_value_length(pc.list_element(rows["kept"], 0)), shape[1]))


def _median(rows: pa.Table, cells: dict[str, dict[str, Any]], shape: tuple[int, int]) -> Profile:
    """Return the division of the row with the median padding. cells: hash -> row of the cell.

    Padding is the number of entries with each layer's heads padded to the longest, over the number of entries.
    """
    flat_counts = rows["kept"].combine_chunks().flatten().flatten().to_numpy(zero_copy_only=False)
    kept_counts = flat_counts.reshape(-1, *shape).astype(np.int64)
    padding_of_row = shape[1] * kept_counts.max(2).sum(1) / np.maximum(kept_counts.sum((1, 2)), 1)
    cell, sample = (np.asarray(rows[name].to_pylist(), str) for name in ("cell", "sample_id"))
    median_row = int(np.lexsort((cell, sample, padding_of_row))[(len(padding_of_row) - 1) // 2])
    row = rows.slice(median_row, 1).drop_columns("kept").to_pylist()[0]
    return Profile(
        kept=tuple(tuple(map(int, layer)) for layer in kept_counts[median_row]),
        entries=int(row["budget_entries"]),
        tokens=int(row["context_tokens"]),
        cell=row["cell"],
        sample=row["sample_id"],
        model=cells[row["cell"]]["model"],
        dataset=cells[row["cell"]]["dataset"],
    )

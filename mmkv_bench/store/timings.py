"""Rows of timed passes: one small file per pass, which a later pass of the same cell, length, batch (built
in the same way) and repeat replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store.rows import safe_name

_PASS = ("cell", "prompt_tokens", "batch", "batch_prefill", "repeat")
MEMORY = "memory"


def file_of(root: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Where the rows of one pass lie.

    Raises:
        StoreError: none, or of several passes.
    """
    passes = {tuple(row.get(name) for name in _PASS) for row in rows}
    if len(passes) != 1:
        raise StoreError(f"timings: rows of {len(passes)} passes are not those of one")
    cell, tokens, batch, way, repeat = passes.pop()
    built = str(batch) if way is None else f"{batch}.{way}"
    name = f"{cell}.{tokens}.{built}.{MEMORY if repeat is None else repeat}"
    return root / "timings" / f"{safe_name('pass', name)}.parquet"


def newest(rows: pa.Table) -> pa.Table:
    """The rows of each pass that were committed last, sorted by pass; packed rows may stand beside newer ones."""
    if not rows.num_rows:
        return rows
    codes = [rows[name].combine_chunks().dictionary_encode("encode").indices.to_numpy() for name in _PASS]
    _, which = np.unique(np.stack(codes), axis=1, return_inverse=True)
    which = which.reshape(-1)
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    last = np.full(which.max() + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, which, when)
    found = rows.filter(pa.array(when == last[which]))
    return found.take(pc.sort_indices(found, [(name, "ascending") for name in _PASS]))

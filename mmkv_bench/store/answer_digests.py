"""Digests of a cell's answers: 128 bits that scores carry, so that a score of other answers is told from one of these.

Of each answer a product of two digests is taken, of its sample's id and of its status and text; a cell's digest is their sum. So
answers may be added part by part, in any order, and two answers that change places change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mmkv_bench.store.parts import codes_of

COLUMNS = ("sample_id", "status", "answer")


def lanes(rows: pa.Table) -> np.ndarray:
    """uint64 [rows, 2]: each answer's part of its cell's digest. rows: with `COLUMNS`, texts coded or not."""
    sample, status, answer = (_coded(rows[name]) for name in COLUMNS)
    of_sample = _digests(sample.dictionary.to_pylist())[codes_of(sample)]
    texts = _digests([f"={text}" for text in answer.dictionary.to_pylist()] + ["-"])[codes_of(answer)]
    statuses = _digests(status.dictionary.to_pylist())[codes_of(status)]
    with np.errstate(over="ignore"):
        return of_sample * (texts * statuses)  # all are odd, so no product hides one of its factors


def shown(low: Any, high: Any) -> str:
    """A digest's two sums as 32 hex digits."""
    return f"{int(high) & _ALL:016x}{int(low) & _ALL:016x}"


def of_cells(rows: pa.Table) -> dict[str, str]:
    """Cell -> the digest of its answers among the rows (column `cell` and `COLUMNS`)."""
    if not rows.num_rows:
        return {}
    cells = _coded(rows["cell"])
    sums, codes = np.zeros((len(cells.dictionary), 2), np.uint64), codes_of(cells)
    with np.errstate(over="ignore"):
        np.add.at(sums, codes, lanes(rows))
    names = cells.dictionary.to_pylist()
    return {names[code]: shown(*sums[code]) for code in np.unique(codes)}


_ALL = (1 << 64) - 1


def _coded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    codes = column.combine_chunks()
    return codes if pa.types.is_dictionary(codes.type) else codes.dictionary_encode()


def _digests(texts: Sequence[str | None]) -> np.ndarray:
    """uint64 [texts, 2], odd numbers."""
    joined = b"".join(hashlib.sha256((text or "").encode()).digest()[:16] for text in texts)
    return np.frombuffer(joined, "<u8").reshape(-1, 2) | np.uint64(1)

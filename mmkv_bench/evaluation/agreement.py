"""How far answers go along with full's, of many cells at once: what `measures.py` makes of rows that hold nothing but answers.

Arrays: tokens of all rows one behind the other, int [tokens]; starts and lengths int [rows] say which are a row's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

MEASURED = ("forced_kl", "forced_agree", "reference_nll", "reference_samples")
"""Columns that make other measures possible; where a cell has none of them, these two are all there is."""
AT_ONCE = 1 << 13  # rows whose tokens are compared at a time


def bare(answers: pa.Table, full: Mapping[str, str], protocols: Mapping[str, str]) -> set[str]:
    """The cells that nothing was measured of while answering, and not of their `full` either, with all that was stored.

    Args:
        answers: response rows with `MEASURED` and `slim`; full: protocol -> its cell of `full`; protocols: cell -> protocol.
    """
    import pyarrow.compute as pc

    some = pc.fill_null(answers["slim"], False)
    for name in MEASURED:
        some = pc.or_(some, pc.is_valid(answers[name]))
    told = set(answers["cell"].filter(some).unique().to_pylist())
    every = answers["cell"].unique().to_pylist()
    return {cell for cell in every if cell not in told and full.get(protocols[cell]) not in told}


def agreement(
    answers: pa.Table, cells: Collection[str], full: Mapping[str, str], protocols: Mapping[str, str]
) -> Iterator[pa.Table]:
    """`divergence`, then `same_answer`, of those cells as rows of the table samples (without dataset), cell by cell in the
    order of the answers. Those of `full` have neither.

    Args:
        answers: response rows of these cells and of full's. Others: see `bare`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    coded = answers["cell"].combine_chunks().dictionary_encode()
    names, of_cell = coded.dictionary.to_pylist(), coded.indices.to_numpy()
    ok = pc.equal(answers["status"], "ok").to_numpy()
    other = _full_rows(answers, names, of_cell, full, protocols)
    wanted = np.array([name in cells and full.get(protocols[name]) != name for name in names], dtype=bool)[of_cell]
    valued = wanted & ok & (other >= 0)
    valued[valued] = ok[other[valued]]
    counted = np.zeros(len(names), dtype=bool)
    counted[of_cell[valued]] = True  # a measure that no row of a cell has is left out
    # No answer to go along with means nothing; any other row without a value is one that could not be measured.
    rows = np.flatnonzero(wanted & counted[of_cell] & (~ok | (other >= 0)))
    agreed, same = _agreed(answers, rows[valued[rows]], other[rows[valued[rows]]])
    picked = answers.select(["cell", "sample_id", "cluster", "status"]).take(pa.array(rows))
    for metric, found in (("divergence", agreed), ("same_answer", same)):
        values = np.full(len(rows), np.nan)
        values[valued[rows]] = found
        yield picked.append_column("metric", pa.repeat(pa.scalar(metric), len(rows))).append_column(
            "value", pa.array(values, mask=~valued[rows])
        )


def _full_rows(
    answers: pa.Table, names: list[str], of_cell: np.ndarray, full: Mapping[str, str], protocols: Mapping[str, str]
) -> np.ndarray:
    """The row of full's answer to the same sample under the same protocol, int [rows]; -1 where there is none."""
    of_sample = answers["sample_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    found = np.full(len(of_sample), -1)
    for protocol, cell in full.items():
        row_of = np.full(of_sample.max(initial=-1) + 1, -1)
        if cell in names:
            own = np.flatnonzero(of_cell == names.index(cell))
            row_of[of_sample[own]] = own
        under = np.array([protocols[name] == protocol for name in names], dtype=bool)[of_cell]
        found[under] = row_of[of_sample[under]]
    return found


def _agreed(answers: pa.Table, rows: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens before the first that differs, float64; 1 where none does and both end there, else 0), [rows]."""
    import pyarrow.compute as pc

    tokens = answers["token_ids"].combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(tokens), 0).to_numpy(zero_copy_only=False)
    flat, starts = tokens.flatten().to_numpy(zero_copy_only=False), np.cumsum(lengths) - lengths
    agreed = np.minimum(lengths[rows], lengths[others]).astype(np.int64)
    for start in range(0, len(rows), AT_ONCE):
        cut = slice(start, start + AT_ONCE)
        common = agreed[cut]
        pair = np.repeat(np.arange(len(common)), common)
        place = np.arange(len(pair)) - np.repeat(np.cumsum(common) - common, common)
        differ = np.flatnonzero(flat[starts[rows[cut]][pair] + place] != flat[starts[others[cut]][pair] + place])
        first, at = np.unique(pair[differ], return_index=True)
        common[first] = place[differ[at]]
    same = (agreed == lengths[rows]) & (agreed == lengths[others])
    return agreed.astype(np.float64), same.astype(np.float64)

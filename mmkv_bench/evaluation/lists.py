"""Columns of lists as arrays: all numbers one behind the other, and which of them are a row's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

AT_ONCE = 1 << 20  # numbers that are Python's, or compared, at a time


@dataclass(frozen=True)
class Lists:
    """flat: the numbers [n]; starts, lengths: int64 [rows], of each row's own; there: bool [rows], false for null (whose
    length is 0)."""

    flat: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    there: np.ndarray

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> Lists:
        import pyarrow.compute as pc

        lists = column.combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        there = pc.is_valid(lists).to_numpy(zero_copy_only=False)
        flat = lists.flatten().to_numpy(zero_copy_only=False)  # without those of null rows
        return cls(flat, np.cumsum(lengths) - lengths, lengths, there)

    def after(self, skipped: np.ndarray) -> Lists:
        """Without the first `skipped`, int [rows], of each row's numbers."""
        skipped = np.minimum(skipped, self.lengths)
        return replace(self, starts=self.starts + skipped, lengths=self.lengths - skipped)

    def first(self) -> Lists:
        """The first number of each row."""
        return replace(self, lengths=np.minimum(self.lengths, 1))

    def sums(self) -> np.ndarray:
        """The sum of each row's numbers, correctly rounded, float64 [rows]."""
        found = np.zeros(len(self.lengths))
        for rows in _cuts(self.lengths):
            starts, ends = self.starts[rows], (self.starts + self.lengths)[rows]
            low = int(starts.min())
            own = self.flat[low : int(ends.max())].tolist()
            spans = zip((starts - low).tolist(), (ends - low).tolist(), strict=True)
            found[rows] = [math.fsum(own[start:end]) for start, end in spans]
        return found

    def leading(self) -> np.ndarray:
        """How many numbers of each row come before the first that is 0 or false, int64 [rows]."""
        ends = np.flatnonzero(self.flat == 0)
        next_end = np.append(ends, len(self.flat))[np.searchsorted(ends, self.starts)]
        return np.minimum(next_end - self.starts, self.lengths)


def agreed(own: Lists, other: Lists, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Numbers before the first that differs, of `rows` of one beside `others` of the other, int64 [rows]."""
    found = np.minimum(own.lengths[rows], other.lengths[others])
    for cut in _cuts(found):
        common = found[cut]
        pair = np.repeat(np.arange(len(common)), common)
        place = np.arange(len(pair)) - np.repeat(np.cumsum(common) - common, common)
        differ = np.flatnonzero(
            own.flat[own.starts[rows[cut]][pair] + place] != other.flat[other.starts[others[cut]][pair] + place]
        )
        first, at = np.unique(pair[differ], return_index=True)
        common[first] = place[differ[at]]
    return found


def _cuts(lengths: np.ndarray) -> Iterator[slice]:
    """Rows one behind the other that hold about `AT_ONCE` numbers together."""
    ends = np.searchsorted(np.cumsum(lengths + 1), np.arange(AT_ONCE, int(lengths.sum()) + len(lengths), AT_ONCE))
    edges = np.unique([0, *ends.tolist(), len(lengths)])
    yield from (slice(start, end) for start, end in pairwise(edges.tolist()))

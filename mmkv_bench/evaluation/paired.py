"""Response rows of many cells, each paired with the answer of `full` to the same sample: what measures are made of.

Columns of lists are arrays here: all numbers one behind the other, and which of them are a row's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    import pyarrow as pa


AT_ONCE = 1 << 20  # numbers that are Python's, or compared, at a time


@dataclass(frozen=True)
class RaggedArray:
    """flat: the numbers [n]; starts, lengths: int64 [rows], of each row's own; there: bool [rows], false for null (whose
    length is 0)."""

    flat: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    there: np.ndarray

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> RaggedArray:
        import pyarrow.compute as pc

        lists = column.combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        there = pc.is_valid(lists).to_numpy(zero_copy_only=False)
        flat = lists.flatten().to_numpy(zero_copy_only=False)  # without those of null rows
        return cls(flat, np.cumsum(lengths) - lengths, lengths, there)

    def after(self, skipped: np.ndarray) -> RaggedArray:
        """Without the first `skipped`, int [rows], of each row's numbers."""
        skipped = np.minimum(skipped, self.lengths)
        return replace(self, starts=self.starts + skipped, lengths=self.lengths - skipped)

    def first(self) -> RaggedArray:
        """The first number of each row."""
        return replace(self, lengths=np.minimum(self.lengths, 1))

    def sums(self) -> np.ndarray:
        """The sum of each row's numbers, correctly rounded, float64 [rows]."""
        sums = np.zeros(len(self.lengths))
        for rows in _cuts(self.lengths):
            starts, ends = self.starts[rows], (self.starts + self.lengths)[rows]
            low = int(starts.min())
            numbers = self.flat[low : int(ends.max())].tolist()
            spans = zip((starts - low).tolist(), (ends - low).tolist(), strict=True)
            sums[rows] = [math.fsum(numbers[start:end]) for start, end in spans]
        return sums

    def leading(self) -> np.ndarray:
        """The count of each row's numbers before the first that is 0 or false, int64 [rows]."""
        ends = np.flatnonzero(self.flat == 0)
        next_end = np.append(ends, len(self.flat))[np.searchsorted(ends, self.starts)]
        return np.minimum(next_end - self.starts, self.lengths)


def agreed(answers: RaggedArray, references: RaggedArray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The count of numbers before the first that differs, of `rows` of one and `others` of the other, int64 [rows]."""
    counts = np.minimum(answers.lengths[rows], references.lengths[others])
    for cut in _cuts(counts):
        common = counts[cut]
        pair = np.repeat(np.arange(len(common)), common)
        place = np.arange(len(pair)) - np.repeat(np.cumsum(common) - common, common)
        differ = np.flatnonzero(
            answers.flat[answers.starts[rows[cut]][pair] + place]
            != references.flat[references.starts[others[cut]][pair] + place]
        )
        first, at = np.unique(pair[differ], return_index=True)
        common[first] = place[differ[at]]
    return counts


def _cuts(lengths: np.ndarray) -> Iterator[slice]:
    """Rows one behind the other that hold about `AT_ONCE` numbers together."""
    ends = np.searchsorted(np.cumsum(lengths + 1), np.arange(AT_ONCE, int(lengths.sum()) + len(lengths), AT_ONCE))
    edges = np.unique([0, *ends.tolist(), len(lengths)])
    yield from (slice(start, end) for start, end in pairwise(edges.tolist()))


VALUE, UNMEASURED, MEANINGLESS = range(3)


class Measured(NamedTuple):
    """A measure of each row. kinds: int [rows], `VALUE`, `UNMEASURED` or `MEANINGLESS`; values: float64 [rows], where that is
    a value; parts: float64 [rows, 2] of a pooled measure."""

    kinds: np.ndarray
    values: np.ndarray
    parts: np.ndarray | None = None


class PairedAnswers:
    """The rows that `measured` gets, each paired with the row of `full`.

    names: the cells; of_cell: int [rows] into them. ok, full_ok: bool [rows], the row's status is ok, and that of full's row;
    other: int [rows], the place of that row in `full`, -1 for none. is_full: bool [rows], the cell is `full` itself; free: int
    [rows], tokens that the cell's protocol takes from the full prefill; slim: bool [rows].
    """

    def __init__(
        self, answers: pa.Table, full: pa.Table, protocols: Mapping[str, str], baselines: Collection[str]
    ) -> None:
        import pyarrow.compute as pc

        self.answers, self.full = answers, full
        coded = answers["cell"].combine_chunks().dictionary_encode()
        self.names, self.of_cell = coded.dictionary.to_pylist(), coded.indices.to_numpy()
        self.ok = _flags(pc.equal(answers["status"], "ok"))
        self.slim = _flags(pc.fill_null(answers["slim"], False))
        self.is_full = self._by_cell([name in baselines for name in self.names], bool)
        self.free = self._by_cell([protocol(protocols[name]).from_prefill for name in self.names], np.int64)
        of_protocol = {protocols[cell]: cell for cell in full["cell"].unique().to_pylist()}
        self.other = self.places(full, [of_protocol.get(protocols[name]) for name in self.names])
        self.full_ok = np.append(_flags(pc.equal(full["status"], "ok")), False)[self.other]
        self._lists: dict[str, RaggedArray] = {}

    def _by_cell(self, values: list, kind: type) -> np.ndarray:
        return np.array(values, kind)[self.of_cell]

    def places(self, among: pa.Table, cells: list[str | None]) -> np.ndarray:
        """int [rows]: the place in `among` of the same sample's row, of the cell that `cells` gives for each of `names`; -1 where
        there is none."""
        import pandas as pd
        import pyarrow as pa
        import pyarrow.compute as pc

        ids, names = among["sample_id"].unique(), among["cell"].unique()
        samples = [
            pc.fill_null(pc.index_in(rows["sample_id"], value_set=ids), -1).to_numpy().astype(np.int64)
            for rows in (among, self.answers)
        ]
        wanted = pc.fill_null(pc.index_in(pa.array(cells, pa.string()), value_set=names), -1).to_numpy()
        cell = pc.index_in(among["cell"], value_set=names).to_numpy().astype(np.int64)
        width = max(len(ids), 1)
        keys = np.where(samples[1] < 0, -1, wanted.astype(np.int64)[self.of_cell] * width + samples[1])
        return pd.Index(cell * width + samples[0]).get_indexer(keys)

    def lists(self, column: str) -> RaggedArray:
        return self._lists.setdefault(column, RaggedArray.of(self.answers[column]))

    @cached_property
    def full_tokens(self) -> RaggedArray:
        return RaggedArray.of(self.full["token_ids"])

    def kept(self, measure: Measured, before: pa.Table) -> Measured:
        """Fill in the measure as it is stored, where slim rows have lost it. before: its rows of the table samples."""
        held = self._by_cell([name in set(before["cell"].unique().to_pylist()) for name in self.names], bool)
        gone = (measure.kinds == UNMEASURED) & self.slim & held
        if not gone.any():
            return measure
        at = self.places(before, self.names)
        stored_rows = np.flatnonzero(gone & (at >= 0))
        stored = before["value"].to_numpy()[at[stored_rows]]
        kinds, values = np.where(gone, MEANINGLESS, measure.kinds), measure.values.astype(np.float64)
        kinds[stored_rows] = np.where(np.isnan(stored), UNMEASURED, VALUE)
        values[stored_rows] = stored
        if measure.parts is None:
            return Measured(kinds, values)
        sums, parts = RaggedArray.of(before["parts"]), measure.parts.copy()
        parts[stored_rows] = sums.flat[sums.starts[at[stored_rows]][:, None] + np.arange(2)]
        return Measured(kinds, values, parts)

    def table(self, metric: str, measure: Measured) -> pa.Table:
        """Rows of the table samples, without dataset; none of cells in which no row has a value."""
        import pyarrow as pa

        valued = (measure.kinds == VALUE) & self.ok
        counted = np.zeros(len(self.names), dtype=bool)
        counted[self.of_cell[valued]] = True
        rows = np.flatnonzero(counted[self.of_cell] & (~self.ok | (measure.kinds != MEANINGLESS)))
        table = self.answers.select(["cell", "sample_id", "cluster", "status"]).take(pa.array(rows))
        missing = ~valued[rows]
        columns = {
            "metric": pa.repeat(pa.scalar(metric), len(rows)),
            "value": pa.array(measure.values[rows].astype(np.float64), mask=missing),
        }
        if measure.parts is not None:  # of what has no value those of an empty answer
            parts = np.where(missing[:, None], 0.0, measure.parts[rows])
            ends = np.arange(0, 2 * len(rows) + 1, 2, dtype=np.int32)
            columns["parts"] = pa.ListArray.from_arrays(ends, parts.ravel())
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table


def is_there(column: pa.ChunkedArray) -> np.ndarray:
    """bool [rows]: rows that are not null."""
    return _flags(column.is_valid())


def _flags(column: pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy().astype(bool)

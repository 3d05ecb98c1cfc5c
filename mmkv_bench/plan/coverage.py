"""What a store holds of the cells of a plan: read once, then counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mmkv_bench.config.schema import CHANGED
from mmkv_bench.store.parts import places
from mmkv_bench.store.response import STATUSES

if TYPE_CHECKING:
    from mmkv_bench.plan.parts import Part

COLUMNS = ("cell", "sample_id", "status", "measured")


class Standing:
    """The rows that there are of some cells.

    Args:
        rows: of the table `responses`, `COLUMNS` among their columns; retry: what does not count as done (`retry` of a run).
    """

    def __init__(self, rows: pa.Table, retry: Collection[str] = ()) -> None:
        self.rows, self.retry = rows, tuple(retry)

    def statuses(self, part: Part) -> np.ndarray:
        """int8 [cells, samples] of a part, in its order: -1 without a row, else the status's place in `STATUSES`."""
        cells, samples = [cell.cell for cell in part.cells], list(part.samples)
        found = np.full([len(cells), len(samples)], -1, np.int8)
        cell, sample, status = (
            places(self.rows[column], pa.array(values, pa.string()))
            for column, values in (("cell", cells), ("sample_id", samples), ("status", STATUSES))
        )
        own = (cell >= 0) & (sample >= 0)
        found[cell[own], sample[own]] = status[own]
        return found

    def answered(self, part: Part) -> np.ndarray:
        """bool [cells, samples]: there is a row, and `retry` does not ask for it again."""
        statuses = self.statuses(part)
        answered = statuses >= 0
        for status in self.retry:
            if status != CHANGED:
                answered &= statuses != STATUSES.index(status)
        if CHANGED in self.retry:
            for row, cell in enumerate(part.cells):
                again = part.changed.get(cell.cell, ())
                answered[row] &= [sample not in again for sample in part.samples]
        return answered

    def done(self, part: Part) -> dict[str, set[str]]:
        """Cell -> ids of the part's samples that are answered."""
        samples = np.array(part.samples, object)
        return {cell.cell: set(samples[row]) for cell, row in zip(part.cells, self.answered(part), strict=True)}

    def count(self, part: Part) -> int:
        """How many of the part's rows there are."""
        return int(self.answered(part).sum())

    def missing(self, part: Part) -> int:
        """How many samples some cell has no row for."""
        return int((~self.answered(part)).any(0).sum())

    def left(self, part: Part) -> int:
        """How many of the part's rows there are not."""
        return int((~self.answered(part)).sum())

    def ok(self, cells: Collection[str]) -> dict[str, int]:
        """Cell -> how many answers it has, of those of these cells that have one."""
        names = sorted(cells)
        of_cell = places(self.rows["cell"], pa.array(names, pa.string()))
        ok = places(self.rows["status"], pa.array(STATUSES[:1], pa.string())) == 0
        counts = np.bincount(of_cell[ok & (of_cell >= 0)], minlength=len(names))
        return {name: int(count) for name, count in zip(names, counts, strict=True) if count}

    def failed(self, part: Part) -> int:
        """How many rows of the part are failures, whichever run made them."""
        return int((self.statuses(part) > 0).sum())

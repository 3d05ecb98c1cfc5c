"""Hours of a plan at the rate at which stored rows of its model were made: time between commits, per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.forecast.forecast import HOUR
from mmkv_bench.forecast.text import duration

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import Coverage, Plan
    from mmkv_bench.store.store import Store


@dataclass(frozen=True)
class Rate:
    """One dataset. missing: rows to make; seconds: of one row, the median over commits; commits: how many; None and 0
    without any. own: the commits are of this dataset, else of the model's other ones. devices: what the rows were made on."""

    dataset: str
    missing: int
    seconds: float | None
    commits: int
    own: bool
    devices: tuple[str, ...]

    @property
    def hours(self) -> float | None:
        """Of all that is missing, in one process."""
        return None if self.seconds is None else self.missing * self.seconds / HOUR


def rates(plan: Plan, coverage: Coverage, store: Store) -> list[Rate]:
    """One rate per dataset of the plan, from what the store holds of the plan's model, whichever its cells."""
    cells = store.cells(columns=("cell", "model_fingerprint", "device"))
    mine = cells.filter(pc.equal(cells["model_fingerprint"], plan.cells[0].model_fingerprint))
    rows = store.responses(mine["cell"].to_pylist(), ("dataset", "worker", "committed_at"))
    dataset, seconds = _per_row(rows)
    devices = tuple(sorted({*mine["device"].drop_null().to_pylist()})) if len(seconds) else ()
    rates = []
    for part in plan.parts:
        own = seconds[dataset == part.dataset]
        taken = own if len(own) else seconds
        median = float(np.median(taken)) if len(taken) else None
        rates.append(Rate(part.dataset, coverage.left(part), median, len(taken), len(own) > 0, devices))
    return rates


def lines(rates: Sequence[Rate]) -> list[str]:
    """A line for each dataset that has rows to make and a rate; one line where none has a rate."""
    todo = [rate for rate in rates if rate.missing]
    if todo and all(rate.hours is None for rate in todo):
        return ["measured   no rate: no rows of this model are stored there, so how long a row takes is not known"]
    return [f"measured   {_line(rate)}" for rate in todo if rate.hours is not None]


def _line(rate: Rate) -> str:
    where = "" if rate.own else ", of its other datasets"
    return (
        f"{rate.dataset}: about {duration(rate.hours or 0)} for {rate.missing:,} rows in one process, {rate.seconds:.3g} s a "
        f"row, median of {rate.commits:,} commits{where} on {', '.join(rate.devices) or 'an unknown device'}"
    )


def _per_row(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, seconds per row) of every commit that has one of the same writer and dataset before it."""
    named = [rows[name].combine_chunks().dictionary_encode() for name in ("dataset", "worker")]
    dataset, worker = (np.asarray(one.indices, np.int64) for one in named)
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    commits, sizes = np.unique(np.stack([worker, dataset, when]), axis=1, return_counts=True)
    follows = (np.diff(commits[:2], axis=1) == 0).all(0)
    seconds = np.diff(commits[2]) / 1e6 / sizes[1:]
    names = np.array(named[0].dictionary.to_pylist(), object)
    return names[commits[1, 1:][follows]], seconds[follows]

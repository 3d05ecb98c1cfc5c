"""Hours of a plan at the rate at which stored rows of its model were made: time between commits, per row.

Rows of a commit share a prefill, so a row costs less in a large commit than in a small one: commits of about as many rows as the
plan has cells count, where there are any. Rows that `pack --slim` wrote have no commit times of their own and do not count.
"""

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
    """Rate of one dataset.

    Attributes:
        missing: rows to make; seconds: of one row, the median over commits, None where no stored row tells; commits: their
            number; rows: median number of rows of one.
        own: the commits are of this dataset, else of the model's other ones; alike: they have about as many rows as this
            plan's will have.
        slim: stored rows of the model that lost their times; devices: those of the rows.
    """

    dataset: str
    missing: int
    seconds: float | None
    commits: int
    rows: int
    own: bool
    alike: bool
    slim: int
    devices: tuple[str, ...]

    @property
    def hours(self) -> float | None:
        """Hours of all that is missing, in one process."""
        return None if self.seconds is None else self.missing * self.seconds / HOUR


def rates(plan: Plan, coverage: Coverage, store: Store) -> list[Rate]:
    """One rate per dataset of the plan, from what the store holds of the plan's model, whichever its cells."""
    cells = store.cells(columns=("cell", "model_fingerprint", "device"))
    mine = cells.filter(pc.equal(cells["model_fingerprint"], plan.cells[0].model_fingerprint))
    stored = store.responses(mine["cell"].to_pylist(), ("dataset", "worker", "committed_at", "slim"))
    timed = stored.filter(pc.invert(pc.fill_null(stored["slim"], False)))
    dataset, seconds, sizes = _per_row(timed)
    devices = tuple(sorted({*mine["device"].drop_null().to_pylist()})) if len(seconds) else ()
    rates = []
    for part in plan.parts:
        own = dataset == part.dataset
        taken = own if own.any() else np.ones(len(own), bool)
        near = taken & (sizes >= len(part.cells) / 2) & (sizes <= len(part.cells) * 2)
        chosen = near if near.any() else taken
        median = float(np.median(seconds[chosen])) if chosen.any() else None
        rows = int(np.median(sizes[chosen])) if chosen.any() else 0
        facts = int(chosen.sum()), rows, bool(own.any()), bool(near.any()), stored.num_rows - timed.num_rows
        rates.append(Rate(part.dataset, coverage.left(part), median, *facts, devices))
    return rates


def lines(rates: Sequence[Rate]) -> list[str]:
    """A line for each dataset that has rows to make and a rate, and one for all together; one line where none has a rate."""
    todo = [rate for rate in rates if rate.missing]
    if todo and all(rate.hours is None for rate in todo):
        why = "no rows of this model are stored there"
        if todo[0].slim:
            why = f"the {todo[0].slim:,} rows of this model there were packed without their times (pack --slim)"
        return [
            f"measured   no rate: {why}, so how long a row takes is not known; run it with limit=3 and out=<another folder>, and "
            "plan with that out"
        ]
    told = [rate for rate in todo if rate.hours is not None]
    together = sum(rate.hours or 0 for rate in told)
    total = f"measured   {duration(together)} in all, in one process; times its threads for core hours"
    return [f"measured   {_line(rate)}" for rate in told] + ([total] if told else [])


def _line(rate: Rate) -> str:
    where = "" if rate.own else ", of its other datasets"
    other = "" if rate.alike else ", unlike this plan's, whose rows cost more or less"
    return (
        f"{rate.dataset}: about {duration(rate.hours or 0)} for {rate.missing:,} rows in one process, {rate.seconds:.3g} s a "
        f"row, median of {rate.commits:,} commits{where} on {', '.join(rate.devices) or 'an unknown device'} with "
        f"{rate.rows:,} rows each{other}"
    )


def _per_row(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dataset, seconds per row, rows) of every commit that has one of the same writer and dataset before it."""
    named = [rows[name].combine_chunks().dictionary_encode() for name in ("dataset", "worker")]
    dataset, worker = (np.asarray(one.indices, np.int64) for one in named)
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    commits, sizes = np.unique(np.stack([worker, dataset, when]), axis=1, return_counts=True)
    follows = (np.diff(commits[:2], axis=1) == 0).all(0)
    seconds = np.diff(commits[2]) / 1e6 / sizes[1:]
    names = np.array(named[0].dictionary.to_pylist(), object)
    return names[commits[1, 1:][follows]], seconds[follows], sizes[1:][follows]

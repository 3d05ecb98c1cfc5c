"""Hours that a plan will take, from stored rows of its model: the time between two commits, divided by the rows of a commit.

Rows of a commit share a prefill, so a row costs less in a large commit than in a small one. So if there are commits with about as
many rows as the plan has cells, only these count. The first question of a document may be decoded with the others, whose commits
then follow at once, so as many commits as a document has questions are taken together. Rows that `pack --slim` wrote have no
commit times and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.forecast.forecast import HOUR
from mmkv_bench.forecast.prefill_counts import questions_per_document
from mmkv_bench.forecast.text import duration

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import Coverage, Plan
    from mmkv_bench.store.store import Store


@dataclass(frozen=True)
class Rate:
    """The time per row at which one dataset's missing rows will probably be generated, estimated from stored rows.

    Rows are stored in commits; the rows of a commit share a prefill.

    Attributes:
        missing: number of missing rows.
        seconds: time per row, the median over commits; None if no stored row has times.
        commits: number of commits.
        rows: median number of rows per commit.
        own: whether the commits belong to this dataset, not to other datasets of the model.
        alike: whether the commits have about as many rows as this plan's commits will have.
        slim: number of the model's stored rows without times.
        devices: devices of the rows.
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
        """Hours that the missing rows will take in one process."""
        return None if self.seconds is None else self.missing * self.seconds / HOUR


def rates(plan: Plan, coverage: Coverage, store: Store) -> list[Rate]:
    """Return one `Rate` (time per row) per dataset of the plan, estimated from all stored rows of the plan's model.

    coverage: which answers are stored.
    """
    cells = store.cells(columns=("cell", "model_fingerprint", "device"))
    mine = cells.filter(pc.equal(cells["model_fingerprint"], plan.cells[0].model_fingerprint))
    stored = store.responses(mine["cell"].to_pylist(), ("dataset", "worker", "committed_at", "slim"))
    timed = stored.filter(pc.invert(pc.fill_null(stored["slim"], False)))
    dataset, seconds, sizes = _commit_intervals(timed)
    devices = tuple(sorted({*mine["device"].drop_null().to_pylist()})) if len(seconds) else ()
    rates = []
    for part in plan.parts:
        own = dataset == part.dataset
        taken = own if own.any() else np.ones(len(own), bool)
        near = taken & (sizes >= len(part.cells) / 2) & (sizes <= len(part.cells) * 2)
        chosen = near if near.any() else taken
        median = _median(seconds[chosen], sizes[chosen], questions_per_document(part) or 1) if chosen.any() else None
        rows = int(np.median(sizes[chosen])) if chosen.any() else 0
        facts = int(chosen.sum()), rows, bool(own.any()), bool(near.any()), stored.num_rows - timed.num_rows
        rates.append(Rate(part.dataset, coverage.left(part), median, *facts, devices))
    return rates


def _median(seconds: np.ndarray, sizes: np.ndarray, questions: float) -> float:
    """Return the median time per row over windows of as many consecutive commits as a document has questions.

    seconds, sizes: duration and number of rows of each commit.
    """
    together = np.ones(min(round(questions), len(seconds)))
    return float(np.median(np.convolve(seconds, together, "valid") / np.convolve(sizes, together, "valid")))


def lines(rates: Sequence[Rate]) -> list[str]:
    """Return lines of text: one per dataset with missing rows and a known rate, and a total. Without any rate, return one
    line."""
    todo = [rate for rate in rates if rate.missing]
    if todo and all(rate.hours is None for rate in todo):
        why = "no rows of this model are stored there"
        if todo[0].slim:
            why = f"the {todo[0].slim:,} rows of this model there were packed without their times (pack --slim)"
        return [
            f"measured   no rate: {why}; to get one, run with limit=3 and out=<another folder>, and plan with that out"
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


def _commit_intervals(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays with one value per commit: dataset, seconds since the previous commit, and number of rows.

    The previous commit is that of the same writer and dataset. The first commit of a writer to a dataset is left out.
    """
    named = [rows[name].combine_chunks().dictionary_encode() for name in ("dataset", "worker")]
    dataset, worker = (np.asarray(one.indices, np.int64) for one in named)
    when = rows["committed_at"].cast(pa.int64()).to_numpy()
    commits, sizes = np.unique(np.stack([worker, dataset, when]), axis=1, return_counts=True)
    follows = (np.diff(commits[:2], axis=1) == 0).all(0)
    seconds = np.diff(commits[2]) / 1e6
    names = np.array(named[0].dictionary.to_pylist(), object)
    return names[commits[1, 1:][follows]], seconds[follows], sizes[1:][follows]

"""Hours that a plan will take, from the commit times of stored rows of its model.

Rows of one commit share a prefill, so a row costs less in a large commit than in a small one. If there are commits with
about as many rows as the plan has cells, only these count. The commits of one document may follow at once, because its
first question may be decoded with the others. So as many commits as a document has questions are taken together. Rows
that `pack --slim` wrote have no commit times and do not count.
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
    """Expected time per row of one dataset's missing rows, estimated from stored rows.

    Attributes:
        missing: number of missing rows.
        seconds: time per row, the median over commits; None if no stored row has times.
        commits, rows: number of commits, and median number of rows per commit.
        own: whether the commits belong to this dataset, not to other datasets of the model.
        alike: whether the commits have about as many rows as this plan's commits will have.
        slim: number of the model's stored rows without times.
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
    """Return one `Rate` per dataset of the plan, from stored rows of its model. coverage: which answers are stored."""
    cells = store.cells(columns=("cell", "model_fingerprint", "device"))
    cells_of_model = cells.filter(pc.equal(cells["model_fingerprint"], plan.cells[0].model_fingerprint))
    stored_rows = store.responses(cells_of_model["cell"].to_pylist(), ("dataset", "worker", "committed_at", "slim"))
    timed_rows = stored_rows.filter(pc.invert(pc.fill_null(stored_rows["slim"], False)))
    dataset_of_commit, seconds_of_commit, rows_per_commit = _commit_intervals(timed_rows)
    devices = tuple(sorted({*cells_of_model["device"].drop_null().to_pylist()})) if len(seconds_of_commit) else ()
    rates = []
    for part in plan.parts:
        is_own_dataset = dataset_of_commit == part.dataset
        is_usable = is_own_dataset if is_own_dataset.any() else np.ones(len(is_own_dataset), bool)
        has_similar_size = (
            is_usable & (rows_per_commit >= len(part.cells) / 2) & (rows_per_commit <= len(part.cells) * 2)
        )
        is_chosen = has_similar_size if has_similar_size.any() else is_usable
        seconds_per_row = (
            _median(seconds_of_commit[is_chosen], rows_per_commit[is_chosen], questions_per_document(part) or 1)
            if is_chosen.any()
            else None
        )
        rows = int(np.median(rows_per_commit[is_chosen])) if is_chosen.any() else 0
        rate_facts = (
            int(is_chosen.sum()),
            rows,
            bool(is_own_dataset.any()),
            bool(has_similar_size.any()),
            stored_rows.num_rows - timed_rows.num_rows,
        )
        rates.append(Rate(part.dataset, coverage.left(part), seconds_per_row, *rate_facts, devices))
    return rates


def _median(seconds: np.ndarray, sizes: np.ndarray, questions: float) -> float:
    """Return the median seconds per row over windows of as many commits as a document has questions. sizes: rows per
    commit."""
    window = np.ones(min(round(questions), len(seconds)))
    return float(np.median(np.convolve(seconds, window, "valid") / np.convolve(sizes, window, "valid")))


def lines(rates: Sequence[Rate]) -> list[str]:
    """Return a line per dataset with missing rows and a known rate, and a total; without any rate, one line."""
    rates_with_missing = [rate for rate in rates if rate.missing]
    if rates_with_missing and all(rate.hours is None for rate in rates_with_missing):
        reason = "no rows of this model are stored there"
        if rates_with_missing[0].slim:
            reason = f"the {rates_with_missing[0].slim:,} rows of this model there were packed without their times (pack --slim)"
        return [
            f"measured   no rate: {reason}; to get one, run with limit=3 and out=<another folder>, and plan with that out"
        ]
    known_rates = [rate for rate in rates_with_missing if rate.hours is not None]
    total_hours = sum(rate.hours or 0 for rate in known_rates)
    total_line = f"measured   {duration(total_hours)} in all, in one process; times its threads for core hours"
    return [f"measured   {_line(rate)}" for rate in known_rates] + ([total_line] if known_rates else [])


def _line(rate: Rate) -> str:
    source_clause = "" if rate.own else ", of its other datasets"
    size_clause = "" if rate.alike else ", unlike this plan's, whose rows cost more or less"
    return (
        f"{rate.dataset}: about {duration(rate.hours or 0)} for {rate.missing:,} rows in one process, {rate.seconds:.3g} s a "
        f"row, median of {rate.commits:,} commits{source_clause} on {', '.join(rate.devices) or 'an unknown device'} with "
        f"{rate.rows:,} rows each{size_clause}"
    )


def _commit_intervals(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays with one value per commit: dataset, seconds since the previous commit, and number of rows.

    The previous commit is of the same writer and dataset; a commit without one is left out.
    """
    coded_columns = [rows[name].combine_chunks().dictionary_encode() for name in ("dataset", "worker")]
    dataset, worker = (np.asarray(one.indices, np.int64) for one in coded_columns)
    commit_times = rows["committed_at"].cast(pa.int64()).to_numpy()
    distinct_commits, rows_per_commit = np.unique(np.stack([worker, dataset, commit_times]), axis=1, return_counts=True)
    has_predecessor = (np.diff(distinct_commits[:2], axis=1) == 0).all(0)
    seconds_since_previous = np.diff(distinct_commits[2]) / 1e6
    dataset_names = np.array(coded_columns[0].dictionary.to_pylist(), object)
    return (
        dataset_names[distinct_commits[1, 1:][has_predecessor]],
        seconds_since_previous[has_predecessor],
        rows_per_commit[1:][has_predecessor],
    )

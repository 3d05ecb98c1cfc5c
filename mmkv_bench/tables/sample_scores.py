"""Scores by sample as arrays. A "cell" is a stored setting: one model, dataset, method, budget, protocol and seed.

A `Sheet` replaces sample ids and cluster labels by their positions in its sorted ids and labels. Positions of different sheets
cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.metric_kinds import CAPS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Scores:
    """Scores of one cell, or averaged over cells that differ only by seed; samples in ascending order of ids.

    samples: int [n], positions in `ids`. clusters: int [n], number of each sample's cluster in the `Sheet`.
    values: float64 [n], NaN unless the sample is ok in all seeds.
    parts: float64 [n, k], numbers from which a pooled metric (not a mean over samples) is computed; None if no sample has
        any. A failed sample has the parts of an empty answer, or NaN if no sample of the cell was ok.
    unjudged: number of samples with an answer but no value, because a judge did not answer or generation did not measure
        the value. These samples are no failures of the model.
    ids: object [S], ids of the sheet's samples.
    """

    samples: np.ndarray
    clusters: np.ndarray
    values: np.ndarray
    parts: np.ndarray | None = None
    unjudged: int = 0
    ids: np.ndarray = field(default_factory=lambda: np.array([], dtype=object))

    @property
    def sample_ids(self) -> np.ndarray:
        return self.ids[self.samples]

    @property
    def n(self) -> int:
        return len(self.values)

    @cached_property
    def ok(self) -> np.ndarray:
        return ~np.isnan(self.values)

    @cached_property
    def n_ok(self) -> int:
        return int(self.ok.sum())

    @property
    def complete(self) -> bool:
        """True if there are samples and all are ok. Only then tables print a score."""
        return self.n > 0 and self.n_ok == self.n

    def among(self, samples: np.ndarray) -> Scores:
        """Return the scores of only the given samples. samples: int [m], positions in `ids`."""
        is_kept = np.isin(self.samples, samples)
        kept_parts = None if self.parts is None else self.parts[is_kept]
        return Scores(self.samples[is_kept], self.clusters[is_kept], self.values[is_kept], kept_parts, ids=self.ids)


def common_samples(scores: Iterable[Scores]) -> np.ndarray:
    """Return the samples that are ok in all of `scores`: positions in `ids`, ascending, int [m]."""
    ok_samples = [own.samples[own.ok] for own in scores]
    if not ok_samples:
        return np.array([], dtype=np.int64)
    counts = np.bincount(np.concatenate(ok_samples).astype(np.int64))
    return np.flatnonzero(counts == len(ok_samples))


@dataclass(frozen=True)
class Sheet:
    """The `samples` rows of some cells, sorted by metric, cell and sample.

    cells: hashes. metrics: names.
    starts: int [metrics, cells + 1]; rows starts[j, i] to starts[j, i + 1] belong to cell i and metric j.
    ids: object [S], sample ids, ascending.
    sample, cluster: int [rows], positions in `ids` and in the sorted cluster labels.
    value: float64 [rows], at most the metric's cap (`CAPS`), NaN for null.
    answered: bool [rows], True if the answer's status is ok.
    parts: list<double> [rows], numbers from which a pooled metric is computed; None if no row has any.
    """

    cells: tuple[str, ...]
    metrics: tuple[str, ...]
    starts: np.ndarray
    ids: np.ndarray
    sample: np.ndarray
    cluster: np.ndarray
    value: np.ndarray
    answered: np.ndarray
    parts: pa.Array | None

    @classmethod
    def of(cls, samples: pd.DataFrame, cells: Sequence[str]) -> Sheet:
        """Make a sheet of the `samples` rows that belong to `cells`, given as hashes.

        Raises:
            StoreError: a sample has two scores of a metric in a cell.
        """
        cell_codes = positions_in(samples["cell"], cells)
        metrics, metric_codes = encode(samples["metric"])
        ids, sample_codes = encode(samples["sample_id"])
        cluster_codes = _clusters(samples)
        sort_keys = (metric_codes.astype(np.int64) * len(cells) + cell_codes) * max(len(ids), 1) + sample_codes
        order = np.flatnonzero(cell_codes >= 0)
        if np.any(np.diff(sort_keys[order]) <= 0):
            order = order[np.argsort(sort_keys[order], kind="stable")]
        sort_keys = sort_keys[order]
        duplicate_places = np.flatnonzero(np.diff(sort_keys) == 0)
        if len(duplicate_places):
            row = order[duplicate_places[0]]
            sample, metric, cell = ids[sample_codes[row]], metrics[metric_codes[row]], cells[cell_codes[row]]
            raise StoreError(
                f"Sample {sample} has more than one {metric} score in cell {cell}: the store is damaged; restore it from a copy."
            )
        edges = np.arange(len(metrics) * len(cells) + 1) * max(len(ids), 1)
        without_parts = "parts" not in samples or samples["parts"].isna().all()
        bounds = np.searchsorted(sort_keys, edges)
        edge_numbers = np.arange(len(metrics))[:, None] * len(cells) + np.arange(len(cells) + 1)
        return cls(
            cells=tuple(cells),
            metrics=tuple(metrics),
            starts=bounds[edge_numbers],
            ids=ids,
            sample=sample_codes[order].astype(np.int32),
            cluster=cluster_codes[order].astype(np.int32),
            value=apply_caps(numbers(samples["value"])[order], metrics, metric_codes[order]),
            answered=is_text(samples["status"], "ok")[order],
            parts=None if without_parts else lists_of(samples["parts"], pa.float64(), order),
        )

    def metrics_of(self, cells: Sequence[int]) -> list[str]:
        """Return the names of the metrics that have a score in any of `cells` (positions), sorted."""
        sizes = np.diff(self.starts, axis=1)[:, list(cells)]
        return [self.metrics[number] for number in np.flatnonzero(sizes.any(axis=1))]

    def rows(self, cell: int, metric: str) -> slice:
        """Return the slice of rows of the cell at position `cell` and of a metric. The slice may be empty."""
        if metric not in self._numbers:
            return slice(0, 0)
        number = self._numbers[metric]
        return slice(int(self.starts[number, cell]), int(self.starts[number, cell + 1]))

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.metrics)}

    def slices(self) -> Iterator[tuple[int, str, slice]]:
        """Yield (position of the cell, metric, slice of rows) for every cell and metric with rows."""
        for number, metric in enumerate(self.metrics):
            for cell in np.flatnonzero(np.diff(self.starts[number])):
                yield int(cell), metric, slice(int(self.starts[number, cell]), int(self.starts[number, cell + 1]))

    def scores(self, cells: Sequence[int], metric: str) -> Scores:
        """Return the scores by sample, averaged over the cells at positions `cells`, which differ only by seed.

        A sample is ok if each of its rows has status ok and a value.
        """
        slices = [self.rows(cell, metric) for cell in sorted(cells, key=lambda cell: self.cells[cell])]
        if len(slices) == 1:
            (score_slice,) = slices
            answered, value = self.answered[score_slice], self.value[score_slice]
            has_value = answered & ~np.isnan(value)
            values = np.where(has_value, value, np.nan)
            cell_parts = self._parts(score_slice)
            unjudged = int((answered & ~has_value).sum())
            return Scores(self.sample[score_slice], self.cluster[score_slice], values, cell_parts, unjudged, self.ids)
        return self._average(slices)

    def _average(self, slices: Sequence[slice]) -> Scores:
        """Average rows within each sample by compensated summation, in the order of `slices` (the rows of each cell)."""
        samples = np.unique(np.concatenate([self.sample[at] for at in slices]))
        n = len(samples)
        counts, ok, answered = (np.zeros(n, dtype=np.int64) for _ in range(3))
        value_sums, rounding_errors, cluster = np.zeros(n), np.zeros(n), np.full(n, -1, dtype=np.int32)
        parts_of = [self._parts(at) for at in slices]
        width = max((summed_parts.shape[1] for summed_parts in parts_of if summed_parts is not None), default=0)
        summed_parts = np.zeros((n, width))
        for at, of_cell in zip(slices, parts_of, strict=True):
            sample_places = np.searchsorted(samples, self.sample[at])
            value, is_answered = self.value[at], self.answered[at]
            counts[sample_places] += 1
            answered[sample_places] += is_answered
            ok[sample_places] += is_answered & ~np.isnan(value)
            cluster[sample_places] = np.where(cluster[sample_places] < 0, self.cluster[at], cluster[sample_places])
            added = value - rounding_errors[sample_places]
            sums = value_sums[sample_places] + added
            rounding_errors[sample_places] = sums - value_sums[sample_places] - added
            value_sums[sample_places] = sums
            summed_parts[sample_places] += np.nan if of_cell is None else of_cell
        values = np.where(ok == counts, value_sums / counts, np.nan)
        unjudged = int(((answered == counts) & (ok < counts)).sum())
        return Scores(samples, cluster, values, summed_parts / counts[:, None] if width else None, unjudged, self.ids)

    def _parts(self, at: slice) -> np.ndarray | None:
        """Return the column `parts` of the rows `at`, float64 [n, k], NaN for a row without parts; None if no row has any."""
        part_lists = None if self.parts is None else self.parts[at]
        if part_lists is None or part_lists.null_count == len(part_lists):
            return None
        present = part_lists.is_valid().to_numpy(zero_copy_only=False)
        flat_parts = part_lists.flatten().to_numpy(zero_copy_only=False)
        width = len(flat_parts) // int(present.sum())
        if set(part_lists.value_lengths().drop_null().unique().to_pylist()) != {width}:
            raise StoreError(
                "samples: the parts of one metric have different lengths: the store is damaged; restore a copy."
            )
        part_matrix = np.full((len(part_lists), width), np.nan)
        part_matrix[present] = flat_parts.reshape(-1, width)
        return part_matrix


def apply_caps(values: np.ndarray, metrics: Iterable[str], of_metric: np.ndarray) -> np.ndarray:
    """Limit values, float64 [rows], to the cap of each row's metric. of_metric: int [rows], positions in `metrics`."""
    cap_of_metric = np.array([CAPS.get(name, np.inf) for name in metrics] or [np.inf])
    return np.minimum(values, cap_of_metric[of_metric])


def encode(column: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values (object, ascending) and each row's position among them (int [n]; -1 for null)."""
    import pandas as pd

    categories = column if isinstance(column.dtype, pd.CategoricalDtype) else column.astype("category")
    names, codes = categories.cat.categories.to_numpy(object), categories.cat.codes.to_numpy()
    is_used = np.zeros(len(names) + 1, dtype=bool)
    is_used[codes] = True  # the last element stands for -1
    order = np.argsort(names.astype(str), kind="stable")
    order = order[is_used[order]]
    rank = np.full(len(names) + 1, -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    return names[order], rank[codes]


def positions_in(column: pd.Series, names: Iterable[str]) -> np.ndarray:
    """Return the position of each row's text in `names`, int64 [n]; -1 for null and for other texts."""
    position_of = {name: position for position, name in enumerate(names)}
    distinct, codes = encode(column)
    return np.array([*(position_of.get(name, -1) for name in distinct), -1], dtype=np.int64)[codes]


def _clusters(samples: pd.DataFrame) -> np.ndarray:
    """Return the position of each row's cluster among the sorted labels, int [n]. Without a label, the sample id is used."""
    clusters = samples["cluster"]
    if clusters.isna().any():
        clusters = clusters.astype(object).where(clusters.notna(), samples["sample_id"].astype(object))
    return encode(clusters)[1]


def numbers(column: pd.Series) -> np.ndarray:
    """Return a column as float64 [n], NaN for null, also if all values are null and the column has no type."""
    if column.dtype == np.float64:
        return column.to_numpy()
    return column.to_numpy(np.float64, na_value=np.nan)


def is_text(column: pd.Series, text: str) -> np.ndarray:
    """Mask the rows that equal the text, bool [n]; null is False."""
    return (column == text).to_numpy(bool, na_value=False)


def lists_of(column: pd.Series, kind: pa.DataType, order: np.ndarray) -> pa.ListArray:
    """Return a column of lists as an arrow array. kind: type of the items. order: int, positions of the rows to return."""
    list_array = pa.array(column, type=pa.list_(kind), from_pandas=True)
    return (list_array.combine_chunks() if isinstance(list_array, pa.ChunkedArray) else list_array).take(
        pa.array(order)
    )

"""Intervals of many cells at once: the draws of a dataset are the same for all its cells, so one product serves many.

A product always has `WIDTH` columns, so that a cell's numbers do not depend on how many others are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mmkv_bench.statistics.intervals import (
    DRAWS,
    LEVEL,
    NO_INTERVAL,
    Aggregator,
    Interval,
    cluster_draws,
    cluster_index,
    clustered_n,
    equal_clusters,
    interval,
    is_binary,
    percentile_ends,
    wilson,
)
from mmkv_bench.statistics.metric_kinds import Pooled

WIDTH = 32
AT_ONCE = 16  # products of a draw; the sums of all draws take 2.5 MB each

Cell = tuple[np.ndarray, np.ndarray]  # values [n], or parts [n, k], and clusters [n]


def intervals(
    cells: Sequence[Cell], dataset: str, aggregator: Aggregator | None = None, share: bool = True
) -> list[Interval]:
    """`intervals.interval` of each of the cells."""
    found = [NO_INTERVAL] * len(cells)
    waiting: dict[tuple[bool, int, bytes], list[int]] = {}
    index_of: dict[tuple[bool, int, bytes], np.ndarray] = {}
    pooled = aggregator if isinstance(aggregator, Pooled) else None
    for i, (values, clusters) in enumerate(cells):
        if pooled is not aggregator or len(values) == 0:
            found[i] = interval(values, clusters, dataset, aggregator=aggregator, share=share)
            continue
        index, count = cluster_index(clusters)
        key = share and aggregator is None and is_binary(values), count, index.tobytes()
        index_of[key] = index
        waiting.setdefault(key, []).append(i)
    for key, own in waiting.items():
        binary, count, _ = key
        alike = [cells[i][0] for i in own]
        ends: Iterable[Interval]
        if binary:
            ends = _wilson(np.array(alike, dtype=np.float64), index_of[key], count)
        elif count < 2:
            ends = [NO_INTERVAL] * len(own)
        else:
            ends = _bootstrap(alike, index_of[key], count, dataset, pooled)
        for i, each in zip(own, ends, strict=True):
            found[i] = each
    return found


def _wilson(values: np.ndarray, index: np.ndarray, count: int) -> Iterator[Interval]:
    """`intervals.wilson` of cells with the same clusters, values [m, n] of zeros and ones, by their `effective_n`."""
    m, n = values.shape
    means = values.mean(axis=1)
    places = (index + np.arange(m)[:, None] * count).ravel()
    residuals = np.bincount(places, weights=(values - means[:, None]).ravel(), minlength=m * count).reshape(m, count)
    sizes = np.bincount(index, minlength=count)
    equal = None if count == n else equal_clusters(sizes)
    for mean, effective in zip(means.tolist(), clustered_n(sizes, residuals, means.tolist()), strict=True):
        yield Interval(*wilson(mean, effective, clusters=equal), "wilson")


def _bootstrap(
    values: Sequence[np.ndarray], index: np.ndarray, count: int, dataset: str, aggregator: Pooled | None
) -> Iterator[Interval]:
    """The percentile intervals of cells with the same clusters, `index` int [n] of `count`."""
    size = 1 if aggregator is None else values[0].shape[1]
    step = max(1, (WIDTH - (aggregator is None)) // size)
    several = [values[start : start + step] for start in range(0, len(values), step)]
    for start in range(0, len(several), AT_ONCE):
        waiting = several[start : start + AT_ONCE]
        columns = [_columns(own, index, count, max(WIDTH, step * size)) for own in waiting]
        for own, totals in zip(waiting, _drawn(columns, dataset, count), strict=True):
            if aggregator is None:
                drawn = totals[:, : len(own)] / totals[:, -1:]
            else:
                sums = [totals[:, i * size : (i + 1) * size] for i in range(len(own))]
                drawn = np.stack([aggregator.function(each) for each in sums], 1)
            for statistics in drawn.T:
                yield Interval(*percentile_ends(statistics, 1 - LEVEL), "bootstrap")


def _columns(values: Sequence[np.ndarray], index: np.ndarray, count: int, width: int) -> np.ndarray:
    """The clusters' sums of each cell, float64 [clusters, width]; of means the last column is how many samples a cluster has."""
    columns = np.zeros((count, width))
    for i, each in enumerate(values):
        size = each.size // len(each)
        np.add.at(columns[:, i * size : (i + 1) * size], index, each.reshape(len(each), size))
    if values[0].ndim == 1:
        columns[:, -1] = np.bincount(index, minlength=count)
    return columns


def _drawn(columns: Sequence[np.ndarray], dataset: str, count: int) -> Iterator[np.ndarray]:
    """The sums of each draw, float64 [draws, width]; draws of many clusters, which are made anew each time, are made once."""
    totals: list[list[np.ndarray]] = [[] for _ in columns]
    for block in cluster_draws(dataset, count, DRAWS):
        counts = block.astype(np.float64)
        for own, each in zip(totals, columns, strict=True):
            own.append(counts @ each)
    yield from map(np.concatenate, totals)

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
    interval,
    is_binary,
    percentile_ends,
    wilson,
)
from mmkv_bench.statistics.metric_kinds import Pooled

WIDTH = 32

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
    for mean, squares in zip(means.tolist(), (residuals**2).sum(axis=1).tolist(), strict=True):
        yield Interval(*wilson(mean, clustered_n(n, count, mean, squares)), "wilson")


def _bootstrap(
    values: Sequence[np.ndarray], index: np.ndarray, count: int, dataset: str, aggregator: Pooled | None
) -> Iterator[Interval]:
    """The percentile intervals of cells with the same clusters, `index` int [n] of `count`."""
    size = 1 if aggregator is None else values[0].shape[1]
    step = max(1, (WIDTH - (aggregator is None)) // size)
    for start in range(0, len(values), step):
        own = values[start : start + step]
        # The last column of means is how many samples a draw has.
        columns = np.zeros((count, max(WIDTH, step * size)))
        for i, each in enumerate(own):
            np.add.at(columns[:, i * size : (i + 1) * size], index, each.reshape(len(each), size))
        if aggregator is None:
            columns[:, -1] = np.bincount(index, minlength=count)
        totals = np.concatenate([block.astype(np.float64) @ columns for block in cluster_draws(dataset, count, DRAWS)])
        if aggregator is None:
            drawn = totals[:, : len(own)] / totals[:, -1:]
        else:
            drawn = np.stack([aggregator.function(totals[:, i * size : (i + 1) * size]) for i in range(len(own))], 1)
        for statistics in drawn.T:
            yield Interval(*percentile_ends(statistics, 1 - LEVEL), "bootstrap")

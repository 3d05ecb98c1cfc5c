"""Intervals of many cells at once: the draws of a dataset are the same for all its cells, so one product serves many.

A product always has `WIDTH` columns, so that a cell's numbers do not depend on how many others are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mmkv_bench.statistics.intervals import (
    DRAWS,
    LEVEL,
    NO_INTERVAL,
    Aggregator,
    Interval,
    cluster_draws,
    cluster_index,
    interval,
    is_binary,
    percentile_ends,
)
from mmkv_bench.statistics.metric_kinds import Pooled

WIDTH = 32

Cell = tuple[np.ndarray, np.ndarray]  # values [n], or parts [n, k], and clusters [n]


def intervals(
    cells: Sequence[Cell], dataset: str, aggregator: Aggregator | None = None, share: bool = True
) -> list[Interval]:
    """`intervals.interval` of each of the cells."""
    found: list[Interval | None] = [None] * len(cells)
    waiting: dict[tuple[int, bytes], list[int]] = {}
    index_of: dict[tuple[int, bytes], np.ndarray] = {}
    for i, (values, clusters) in enumerate(cells):
        plain = aggregator is None or isinstance(aggregator, Pooled)
        if not plain or len(values) == 0 or (share and aggregator is None and is_binary(values)):
            found[i] = interval(values, clusters, dataset, aggregator=aggregator, share=share)
            continue
        index, count = cluster_index(clusters)
        key = count, index.tobytes()
        index_of[key] = index
        waiting.setdefault(key, []).append(i)
    for (count, bytes_), own in waiting.items():
        if count < 2:
            ends = [NO_INTERVAL] * len(own)
        else:
            index = index_of[count, bytes_]
            ends = _bootstrap([cells[i][0] for i in own], index, count, dataset, aggregator)
        for i, each in zip(own, ends, strict=True):
            found[i] = each
    return found


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

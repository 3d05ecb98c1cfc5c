"""Medians of many groups of values at once, with intervals that ask nothing of how the values are distributed.

Where no two values share a cluster the ends are order statistics, whose level is that of the binomial distribution (Conover,
Practical Nonparametric Statistics, 3.2). Where they do, the ends are the quantiles at 1/2 plus and minus the error of the share
of values below the median, clusters being what varies (Woodruff, JASA 47, 1952).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmkv_bench.statistics.intervals import ALPHA, LEVEL


@dataclass(frozen=True)
class Medians:
    """Medians of groups with their intervals, float64 [groups]; NaN where there is none.

    level: that of the interval from `low` to `high`: 0.95 at least, or, of fewer than six values, what the least and the largest
    have: 1 - 2^(1 - n). n: values, int [groups].
    """

    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    level: np.ndarray
    n: np.ndarray


def medians(values: np.ndarray, groups: np.ndarray, clusters: np.ndarray, count: int) -> Medians:
    """Medians of `count` groups.

    Args:
        values: float64 [n], NaN is left out; groups: int [n] in 0..count - 1; clusters: int [n], not negative, what is not
            independent within a group.
    """
    finite = ~np.isnan(values)
    values, groups, clusters = values[finite], groups[finite], clusters[finite]
    order = np.lexsort((values, groups))
    values, groups, clusters = values[order], groups[order], clusters[order]
    n = np.bincount(groups, minlength=count)
    start = np.cumsum(n) - n
    some = n > 0
    made = {name: np.full(count, np.nan) for name in ("median", "low", "high", "level")}
    made["median"][some] = (values[(start + (n - 1) // 2)[some]] + values[(start + n // 2)[some]]) / 2
    n_cluster_ids = int(clusters.max(initial=0)) + 1
    pairs, pair = np.unique(groups * n_cluster_ids + clusters, return_inverse=True)
    distinct = np.bincount(pairs // n_cluster_ids, minlength=count)
    skip, made["level"] = _order_statistics(n)
    shared = distinct < n
    if shared.any():
        sides = np.sign(values - made["median"][groups]) / 2
        sums = np.bincount(pair.reshape(-1), weights=sides, minlength=len(pairs))
        between = np.bincount(pairs // n_cluster_ids, weights=sums**2, minlength=count)
        within = np.bincount(groups, weights=sides**2, minlength=count)
        skip[shared] = _clustered(n[shared], distinct[shared], between[shared], within[shared])
        made["level"][shared] = LEVEL
    bounded = some & (skip >= 0)
    made["low"][bounded] = values[(start + skip)[bounded]]
    made["high"][bounded] = values[(start + n - 1 - skip)[bounded]]
    made["level"][~bounded] = np.nan
    return Medians(n=n, **made)


def _order_statistics(n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(how many of n independent values lie beyond each end, -1 where there is no interval; its level)."""
    from scipy.special import bdtr

    skip, level = np.full(len(n), -1), np.full(len(n), np.nan)
    for size in np.unique(n[n > 1]):
        beyond = bdtr(np.arange(size // 2, dtype=float), int(size), 0.5)  # P(at most so many values below the median)
        most = int(np.searchsorted(beyond, ALPHA / 2, side="right")) - 1
        skip[n == size] = max(most, 0)
        level[n == size] = LEVEL if most >= 0 else 1 - 2 * beyond[0]
    return skip, level


def _clustered(n: np.ndarray, clusters: np.ndarray, between: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Values beyond each end, where values share clusters. between, within: sums of squares of half the signs over these."""
    from scipy.special import stdtrit

    skip = np.full(len(n), -1)
    some = clusters > 1
    n, clusters, between, within = n[some], clusters[some], between[some], within[some]
    effect = np.maximum(between * clusters / (clusters - 1) / np.maximum(within, 0.25), 1.0)
    below = 0.5 - stdtrit(clusters - 1, 1 - ALPHA / 2) * np.sqrt(0.25 * effect / n)
    skip[some] = np.where(below > 0, np.floor(n * below).astype(np.int64), -1)
    return skip

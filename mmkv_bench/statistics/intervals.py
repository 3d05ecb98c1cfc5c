"""Confidence intervals of scores: Wilson's for means of zeros and ones, otherwise a bootstrap over clusters.

Samples of one cluster (an image, a document, a video, a page) are not independent, so both intervals work on clusters:
the bootstrap draws whole clusters; Wilson's interval uses the effective number of samples (`clustered_n`) and Student's
quantile by the number of clusters.
All methods of a dataset have the same draws, so one matrix product serves many of them. A product always has `WIDTH`
columns, so that a method's numbers do not depend on the number of methods.

Intervals of medians assume nothing about the distribution of values. If no two values share a cluster, the ends are order
statistics, whose level follows from the binomial distribution (Conover, Practical Nonparametric Statistics, 3.2). Otherwise
the ends are the quantiles at 1/2 plus and minus the error of the share of values below the median, computed over clusters
(Woodruff, JASA 47, 1952).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from mmkv_bench.statistics.metric_kinds import Pooled

DRAWS = 10_000
ALPHA = 0.05
LEVEL = 1 - ALPHA
WIDTH = 32
AT_ONCE = 16  # products per draw; the sums of all draws take 2.5 MB per product

_LARGEST_SHARE = 0.9  # cap on a cluster's share of the samples, in the jackknife
_BLOCK_ENTRIES = 1 << 22  # counts computed at a time
_CACHE_ENTRIES = 1 << 26  # 128 MiB of uint16; more counts than these are computed anew at each use


@dataclass(frozen=True)
class Interval:
    """A two-sided interval; `kind` is `wilson`, `bootstrap` or `none` (`none`: both ends are None)."""

    low: float | None
    high: float | None
    kind: str


NO_INTERVAL = Interval(None, None, "none")


def wilson(mean: float, n: float, level: float = LEVEL, clusters: float | None = None) -> tuple[float, float]:
    """Return (lower, upper) end of Wilson's score interval (1927) of a proportion `mean` of `n` > 0 trials.

    clusters: the number of equal clusters (`equal_clusters`), if `n` is an effective number that was estimated from clusters.
        The quantile is then Student's, because few clusters estimate the variance badly.
    """
    from scipy.special import stdtrit

    upper = 0.5 + level / 2
    z2 = (NormalDist().inv_cdf(upper) if clusters is None else float(stdtrit(max(clusters - 1, 1.0), upper))) ** 2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # The interval contains its estimate; the clipping only removes rounding at 0 and 1.
    return float(min(max(centre - half, 0.0), mean)), float(max(min(centre + half, 1.0), mean))


def cluster_index(clusters: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (each sample's position among the sorted distinct clusters, int [n]; the number of clusters)."""
    clusters = np.asarray(clusters)
    if clusters.dtype.kind == "i":  # positions of labels, the same for most cells of a dataset
        return _index_of(clusters.tobytes(), clusters.dtype.str)
    distinct, index = np.unique(clusters, return_inverse=True)
    return index.reshape(-1), len(distinct)


@lru_cache(maxsize=64)
def _index_of(positions: bytes, kind: str) -> tuple[np.ndarray, int]:
    distinct, index = np.unique(np.frombuffer(positions, kind), return_inverse=True)
    index.setflags(write=False)
    return index.reshape(-1), len(distinct)


def clustered_n(sizes: np.ndarray, residuals: np.ndarray, means: Sequence[float]) -> list[float]:
    """Return, per mean, the number of independent zeros and ones that would vary as much as the clustered ones.

    This is n divided by the design effect: the jackknife variance of the mean over clusters, relative to p(1-p)/n. It is exactly
    n if every cluster holds one sample, and never above n. If all values are equal, their likeness within clusters cannot be
    seen; then the worst case is taken, the number of equal clusters.

    Args:
        sizes: int [G], samples of each cluster.
        residuals: float64 [m, G], values less the mean, summed within clusters.
        means: the m mean scores.
    """
    n = int(sizes.sum())
    if len(sizes) == n:
        return [float(n)] * len(means)
    # A cluster pulls the mean towards itself, so its residual is taken from the mean without it.
    residual_scale = (1 - 1 / len(sizes)) / (1 - np.minimum(sizes / n, _LARGEST_SHARE))
    squares = ((residuals * residual_scale) ** 2).sum(axis=1).tolist()
    equal_count = equal_clusters(sizes)
    return [
        equal_count if mean in (0.0, 1.0) else n / max(square / (n * mean * (1 - mean)), 1.0)
        for mean, square in zip(means, squares, strict=True)
    ]


def equal_clusters(sizes: np.ndarray) -> float:
    """Return how many clusters of equal size determine a mean as precisely: (sum of sizes)^2 / sum of squared sizes."""
    return float(sizes.sum() ** 2 / np.sum(sizes.astype(np.float64) ** 2))


def _count_blocks(dataset: str, n_clusters: int, draws: int) -> Iterator[np.ndarray]:
    """Yield `draws` bootstrap draws in blocks [rows, n_clusters] uint16: how often each draw (row) contains each cluster."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(dataset.encode()).digest()[:8], "big"))
    draws_at_once = max(1, _BLOCK_ENTRIES // n_clusters)
    for start in range(0, draws, draws_at_once):
        rows = min(draws_at_once, draws - start)
        picked_clusters = rng.integers(n_clusters, size=(rows, n_clusters)) + np.arange(rows)[:, None] * n_clusters
        counts = np.bincount(picked_clusters.ravel(), minlength=rows * n_clusters)
        yield counts.reshape(rows, n_clusters).astype(np.uint16)


@lru_cache(maxsize=4)
def _cached_blocks(dataset: str, n_clusters: int, draws: int) -> tuple[np.ndarray, ...]:
    return tuple(_count_blocks(dataset, n_clusters, draws))


def cluster_draws(dataset: str, n_clusters: int, draws: int = DRAWS) -> Iterator[np.ndarray]:
    """Yield bootstrap draws as counts of clusters, in blocks [rows, n_clusters] uint16.

    The draws depend only on the dataset's name and the number of clusters, so all methods of a dataset get the same draws.
    """
    make_blocks = _cached_blocks if draws * n_clusters <= _CACHE_ENTRIES else _count_blocks
    yield from make_blocks(dataset, n_clusters, draws)


def percentile_ends(statistics: np.ndarray, alpha: float) -> tuple[float, float]:
    """Return (lower, upper) end of the percentile interval at level 1 - alpha, by order statistics of the draws.

    If the draws are too few for this level (alpha < 2 / (draws + 1)), the interval is unbounded rather than too narrow.
    """
    draws = len(statistics)
    skipped_draws = int(np.floor(alpha * (draws + 1) / 2 + 1e-9)) - 1
    if skipped_draws < 0:
        return -np.inf, np.inf
    ordered = np.partition(statistics, (skipped_draws, draws - 1 - skipped_draws))
    return float(ordered[skipped_draws]), float(ordered[draws - 1 - skipped_draws])


Cell = tuple[np.ndarray, np.ndarray]
"""Values [n], or parts [n, k], and clusters [n]."""


def intervals(
    cells: Sequence[Cell], dataset: str, aggregator: Pooled | None = None, share: bool = True
) -> list[Interval]:
    """Return the interval of each score: Wilson's for a mean of zeros and ones, otherwise the percentile bootstrap over clusters.

    Without samples a score has no interval, and with a single cluster it has no bootstrap interval.

    cells: (values, clusters) of the samples of each method at one budget.
    share: the scores are shares of 1; otherwise they are amounts, for which Wilson's interval is not used.
    """
    intervals = [NO_INTERVAL] * len(cells)
    cells_alike: dict[tuple[bool, int, bytes], list[int]] = {}
    for i, (values, clusters) in enumerate(cells):
        index, count = cluster_index(clusters)
        binary = share and aggregator is None and bool(((values == 0) | (values == 1)).all())
        if len(values) and (binary or count > 1):
            cells_alike.setdefault((binary, count, index.tobytes()), []).append(i)
    for (binary, count, _), numbers in cells_alike.items():
        alike_values = [cells[i][0] for i in numbers]
        index, _ = cluster_index(cells[numbers[0]][1])
        intervals_of_group: Iterable[Interval]
        if binary:
            intervals_of_group = _wilson(np.array(alike_values, dtype=np.float64), index, count)
        else:
            draws = bootstrap_statistics(alike_values, index, count, dataset, aggregator)
            intervals_of_group = (Interval(*percentile_ends(drawn, 1 - LEVEL), "bootstrap") for drawn in draws)
        for i, each in zip(numbers, intervals_of_group, strict=True):
            intervals[i] = each
    return intervals


def _wilson(values: np.ndarray, index: np.ndarray, count: int) -> Iterator[Interval]:
    """Yield Wilson's interval for each row of `values`, with effective numbers of samples (`clustered_n`).

    values: [m, n] of zeros and ones. index: int [n], cluster of each sample. count: number of clusters.
    """
    m, n = values.shape
    means = values.mean(axis=1)
    cluster_places = (index + np.arange(m)[:, None] * count).ravel()
    weights = (values - means[:, None]).ravel()
    residuals = np.bincount(cluster_places, weights=weights, minlength=m * count).reshape(m, count)
    sizes = np.bincount(index, minlength=count)
    equal_count = None if count == n else equal_clusters(sizes)
    for mean, effective in zip(means.tolist(), clustered_n(sizes, residuals, means.tolist()), strict=True):
        yield Interval(*wilson(mean, effective, clusters=equal_count), "wilson")


def bootstrap_statistics(
    values: Sequence[np.ndarray],
    index: np.ndarray,
    count: int,
    dataset: str,
    aggregator: Pooled | None = None,
    draws: int = DRAWS,
) -> Iterator[np.ndarray]:
    """Yield for each array of `values` the statistic of every bootstrap draw, float64 [draws].

    The statistic is the mean of the drawn samples, or the metric computed by `aggregator` from their sums.

    Args:
        values: per method float64 [n]; for a `Pooled` aggregator [n, k], the numbers from which it is computed.
        index: int [n], cluster number of each sample, below `count`; the same for all methods.
        dataset: name that seeds the draws.
    """
    size = 1 if aggregator is None else values[0].shape[1]
    cells_per_product = max(1, (WIDTH - (aggregator is None)) // size)
    products = [values[start : start + cells_per_product] for start in range(0, len(values), cells_per_product)]
    for start in range(0, len(products), AT_ONCE):
        products_at_once = products[start : start + AT_ONCE]
        columns = [_columns(cells, index, count, max(WIDTH, cells_per_product * size)) for cells in products_at_once]
        sums: list[list[np.ndarray]] = [[] for _ in products_at_once]
        for block in cluster_draws(dataset, count, draws):  # with many clusters, draws are computed anew at each use
            counts = block.astype(np.float64)
            for blocks, each in zip(sums, columns, strict=True):
                blocks.append(counts @ each)
        for cells, totals in zip(products_at_once, map(np.concatenate, sums), strict=True):
            for i in range(len(cells)):
                sums_of_draws = totals[:, i * size : (i + 1) * size]
                yield sums_of_draws[:, 0] / totals[:, -1] if aggregator is None else aggregator.function(sums_of_draws)


def _columns(values: Sequence[np.ndarray], index: np.ndarray, count: int, width: int) -> np.ndarray:
    """Return the sums by cluster of several arrays side by side, float64 [clusters, width].

    For means the last column is the number of samples in each cluster.
    """
    columns = np.zeros((count, width))
    for i, each in enumerate(values):
        size = each.size // len(each)
        np.add.at(columns[:, i * size : (i + 1) * size], index, each.reshape(len(each), size))
    if values[0].ndim == 1:
        columns[:, -1] = np.bincount(index, minlength=count)
    return columns


@dataclass(frozen=True)
class Medians:
    """Medians of groups with their intervals, float64 [groups]; NaN for a group without one."""

    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    level: np.ndarray  # confidence level, at least 0.95; n < 6 values give their range, with level 1 - 2^(1 - n)
    n: np.ndarray  # int [groups], number of values


def medians(values: np.ndarray, groups: np.ndarray, clusters: np.ndarray, count: int) -> Medians:
    """Return the medians of `count` groups of values, with their intervals.

    Args:
        values: float64 [n]; NaN is left out.
        groups: int [n] in 0..count - 1.
        clusters: int [n], not negative; values of one cluster are not independent.
    """
    is_finite = ~np.isnan(values)
    values, groups, clusters = values[is_finite], groups[is_finite], clusters[is_finite]
    order = np.lexsort((values, groups))
    values, groups, clusters = values[order], groups[order], clusters[order]
    n = np.bincount(groups, minlength=count)
    first_places = np.cumsum(n) - n
    has_values = n > 0
    columns = {name: np.full(count, np.nan) for name in ("median", "low", "high", "level")}
    columns["median"][has_values] = (
        values[(first_places + (n - 1) // 2)[has_values]] + values[(first_places + n // 2)[has_values]]
    ) / 2
    n_cluster_ids = int(clusters.max(initial=0)) + 1
    pairs, pair_of_value = np.unique(groups * n_cluster_ids + clusters, return_inverse=True)
    clusters_per_group = np.bincount(pairs // n_cluster_ids, minlength=count)
    skipped_values, columns["level"] = _order_statistics(n)
    has_repeated_clusters = clusters_per_group < n
    if has_repeated_clusters.any():
        signs_around_median = np.sign(values - columns["median"][groups]) / 2
        sums = np.bincount(pair_of_value.reshape(-1), weights=signs_around_median, minlength=len(pairs))
        variance_between = np.bincount(pairs // n_cluster_ids, weights=sums**2, minlength=count)
        variance_within = np.bincount(groups, weights=signs_around_median**2, minlength=count)
        skipped_values[has_repeated_clusters] = _clustered_skip(
            n[has_repeated_clusters],
            clusters_per_group[has_repeated_clusters],
            variance_between[has_repeated_clusters],
            variance_within[has_repeated_clusters],
        )
        columns["level"][has_repeated_clusters] = LEVEL
    has_interval = has_values & (skipped_values >= 0)
    columns["low"][has_interval] = values[(first_places + skipped_values)[has_interval]]
    columns["high"][has_interval] = values[(first_places + n - 1 - skipped_values)[has_interval]]
    columns["level"][~has_interval] = np.nan
    return Medians(n=n, **columns)


def _order_statistics(n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (skip, level) for each group of `n` independent values: values to skip at each end, and confidence level.

    A group of fewer than two values has skip -1 and level NaN.
    """
    from scipy.special import bdtr

    skip, level = np.full(len(n), -1), np.full(len(n), np.nan)
    for size in np.unique(n[n > 1]):
        # P(at most 0, 1, ... values below the median)
        tail_probabilities = bdtr(np.arange(size // 2, dtype=float), int(size), 0.5)
        most_skipped = int(np.searchsorted(tail_probabilities, ALPHA / 2, side="right")) - 1
        skip[n == size] = max(most_skipped, 0)
        level[n == size] = LEVEL if most_skipped >= 0 else 1 - 2 * tail_probabilities[0]
    return skip, level


def _clustered_skip(n: np.ndarray, clusters: np.ndarray, between: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Return how many values to skip at either end for a median's interval if values share clusters; -1 without an interval.

    With s = sign(value - median) / 2, `between` is the sum of squared cluster sums of s, and `within` the sum of squares of s.
    Their ratio gives the design effect. n, clusters: numbers of values and of clusters. All arrays have one entry per group.
    """
    from scipy.special import stdtrit

    skip = np.full(len(n), -1)
    has_clusters = clusters > 1
    n, clusters, between, within = n[has_clusters], clusters[has_clusters], between[has_clusters], within[has_clusters]
    design_effect = np.maximum(between * clusters / (clusters - 1) / np.maximum(within, 0.25), 1.0)
    rank_below = 0.5 - stdtrit(clusters - 1, 1 - ALPHA / 2) * np.sqrt(0.25 * design_effect / n)
    skip[has_clusters] = np.where(rank_below > 0, np.floor(n * rank_below).astype(np.int64), -1)
    return skip

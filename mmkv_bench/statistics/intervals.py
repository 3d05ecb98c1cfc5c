"""Confidence intervals of one cell's score: Wilson for means of zeros and ones, else a bootstrap over clusters.

Samples of one cluster (an image, a document, a video, a page) are not independent, so both intervals work on clusters:
the bootstrap draws whole clusters, Wilson's interval uses the effective number of samples (`effective_n`) and Student's
quantile by the number of clusters.
Arrays: `values` float64 [n], one finite score per sample; `clusters` [n], any sortable label per sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from mmkv_bench.statistics.metric_kinds import Pooled

DRAWS = 10_000
ALPHA = 0.05
LEVEL = 1 - ALPHA
Aggregator = Callable[[np.ndarray], float]

_MOST = 0.9  # of the samples in one cluster, for the jackknife
_BLOCK_ENTRIES = 1 << 22  # counts made at a time
_CACHE_ENTRIES = 1 << 26  # 128 MiB of uint16: above it the counts are made anew at each use


@dataclass(frozen=True)
class Interval:
    """A two-sided interval; `kind` is `wilson`, `bootstrap` or `none` (then both ends are None)."""

    low: float | None
    high: float | None
    kind: str


NO_INTERVAL = Interval(None, None, "none")


def normal_quantile(level: float) -> float:
    """z of a two-sided interval: 1.95996... for level 0.95."""
    return NormalDist().inv_cdf(0.5 + level / 2)


def t_quantile(level: float, freedom: float) -> float:
    """Student's quantile of a two-sided interval; at least one degree of freedom is taken."""
    from scipy.special import stdtrit

    return float(stdtrit(max(freedom, 1.0), 0.5 + level / 2))


def is_binary(values: np.ndarray) -> bool:
    """True if every score is exactly 0 or 1."""
    return bool(((values == 0) | (values == 1)).all())


def wilson(mean: float, n: float, level: float = LEVEL, clusters: float | None = None) -> tuple[float, float]:
    """Wilson's score interval (1927) of a proportion `mean` of `n` > 0 trials.

    clusters: where `n` is an effective number that was estimated from clusters, how many equal ones (`equal_clusters`); the
    quantile is then Student's, for the variance of few clusters is estimated badly.
    """
    z2 = (normal_quantile(level) if clusters is None else t_quantile(level, clusters - 1)) ** 2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # The interval holds its estimate; the clipping only removes rounding at 0 and 1.
    return float(min(max(centre - half, 0.0), mean)), float(max(min(centre + half, 1.0), mean))


def cluster_index(clusters: np.ndarray) -> tuple[np.ndarray, int]:
    """(index [n] into the sorted distinct clusters, how many there are)."""
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


def effective_n(values: np.ndarray, clusters: np.ndarray) -> float:
    """Number of independent zeros and ones that would vary as much as these clustered ones do.

    n divided by the design effect: the variance of the mean over clusters, by the jackknife, against p(1-p)/n. It is exactly n
    when every cluster holds one sample, never above n, and the number of equal clusters when all values are equal (their
    likeness within clusters cannot be seen then, so the worst is taken).
    """
    index, count = cluster_index(clusters)
    mean = float(np.mean(values))
    return clustered_n(np.bincount(index), np.bincount(index, weights=values - mean, minlength=count)[None], [mean])[0]


def clustered_n(sizes: np.ndarray, residuals: np.ndarray, means: Sequence[float]) -> list[float]:
    """`effective_n` of m cells. sizes: int [G], samples of each cluster; residuals: float64 [m, G], values less the mean
    summed within clusters."""
    n = int(sizes.sum())
    if len(sizes) == n:
        return [float(n)] * len(means)
    # A cluster pulls the mean towards itself, so its residual is taken from the mean without it.
    scale = (1 - 1 / len(sizes)) / (1 - np.minimum(sizes / n, _MOST))
    squares = ((residuals * scale) ** 2).sum(axis=1).tolist()
    equal = equal_clusters(sizes)
    return [
        equal if mean in (0.0, 1.0) else n / max(square / (n * mean * (1 - mean)), 1.0)
        for mean, square in zip(means, squares, strict=True)
    ]


def equal_clusters(sizes: np.ndarray) -> float:
    """Number of clusters of one size that say as much about a mean as these do: (sum of sizes)^2 / sum of their squares."""
    return float(sizes.sum() ** 2 / np.sum(sizes.astype(np.float64) ** 2))


def _seed(dataset: str) -> int:
    return int.from_bytes(hashlib.sha256(dataset.encode()).digest()[:8], "big")


def _count_blocks(dataset: str, n_clusters: int, draws: int) -> Iterator[np.ndarray]:
    """Blocks [rows, n_clusters] uint16: how often each draw holds each cluster. `draws` rows in all."""
    rng = np.random.default_rng(_seed(dataset))
    step = max(1, _BLOCK_ENTRIES // n_clusters)
    for start in range(0, draws, step):
        rows = min(step, draws - start)
        picks = rng.integers(n_clusters, size=(rows, n_clusters)) + np.arange(rows)[:, None] * n_clusters
        counts = np.bincount(picks.ravel(), minlength=rows * n_clusters)
        yield counts.reshape(rows, n_clusters).astype(np.uint16)


@lru_cache(maxsize=4)
def _cached_blocks(dataset: str, n_clusters: int, draws: int) -> tuple[np.ndarray, ...]:
    return tuple(_count_blocks(dataset, n_clusters, draws))


def cluster_draws(dataset: str, n_clusters: int, draws: int = DRAWS) -> Iterator[np.ndarray]:
    """Bootstrap draws as cluster counts, in blocks [rows, n_clusters] uint16.

    They depend on the dataset's name and the number of clusters alone, so all cells of a dataset see the same draws.
    """
    make = _cached_blocks if draws * n_clusters <= _CACHE_ENTRIES else _count_blocks
    yield from make(dataset, n_clusters, draws)


def bootstrap_statistics(
    values: np.ndarray, clusters: np.ndarray, dataset: str, aggregator: Aggregator | None = None, draws: int = DRAWS
) -> np.ndarray:
    """The statistic of each draw of clusters, float64 [draws]: the mean of the drawn samples, or `aggregator` of them.

    `aggregator` gets the drawn samples' values, [m] or [m, k] (a sample drawn twice appears twice, in cluster order); one
    that is `Pooled` gets their sums, of all draws at once.
    """
    index, count = cluster_index(clusters)
    if isinstance(aggregator, Pooled):
        columns = np.zeros((count, values.shape[1]))
        np.add.at(columns, index, values)
        draws_of = cluster_draws(dataset, count, draws)
        return np.concatenate([aggregator.function(block.astype(np.float64) @ columns) for block in draws_of])
    if aggregator is None:
        columns = np.stack(
            [np.bincount(index, weights=values, minlength=count), np.bincount(index, minlength=count)], 1
        )
        totals = np.concatenate([block.astype(np.float64) @ columns for block in cluster_draws(dataset, count, draws)])
        return totals[:, 0] / totals[:, 1]
    order = np.argsort(index, kind="stable")
    ordered, sorted_index = values[order], index[order]
    return np.array(
        [
            aggregator(np.repeat(ordered, row[sorted_index], axis=0))
            for block in cluster_draws(dataset, count, draws)
            for row in block
        ]
    )


def percentile_ends(statistics: np.ndarray, alpha: float) -> tuple[float, float]:
    """Percentile interval at level 1 - alpha, by order statistics of the draws.

    A level finer than the draws can tell (alpha < 2 / (draws + 1)) gives an unbounded interval rather than one that claims
    too much.
    """
    draws = len(statistics)
    skip = int(np.floor(alpha * (draws + 1) / 2 + 1e-9)) - 1
    if skip < 0:
        return -np.inf, np.inf
    ordered = np.partition(statistics, (skip, draws - 1 - skip))
    return float(ordered[skip]), float(ordered[draws - 1 - skip])


def interval(
    values: np.ndarray,
    clusters: np.ndarray,
    dataset: str,
    level: float = LEVEL,
    aggregator: Aggregator | None = None,
    share: bool = True,
) -> Interval:
    """Interval of a cell's score: Wilson for a mean of zeros and ones, else the percentile bootstrap over clusters.

    No interval is given for no sample, nor by a bootstrap of a single cluster, which cannot vary. `share` False: the score
    is an amount, and zeros and ones among its values are a coincidence.
    """
    if len(values) == 0:
        return NO_INTERVAL
    if share and aggregator is None and is_binary(values):
        sizes = np.bincount(cluster_index(clusters)[0])
        equal = None if len(sizes) == len(values) else equal_clusters(sizes)
        return Interval(*wilson(float(np.mean(values)), effective_n(values, clusters), level, equal), "wilson")
    if cluster_index(clusters)[1] < 2:
        return NO_INTERVAL
    statistics = bootstrap_statistics(values, clusters, dataset, aggregator)
    return Interval(*percentile_ends(statistics, 1 - level), "bootstrap")

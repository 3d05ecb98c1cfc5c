"""Scores of methods as sums over clusters, such that a method's aggregate is (sum of its sums) / (sum of the sizes).

A mean has them as it is: a cluster's scores summed, over its number of samples. Perplexity has them on the log scale:
negative log-likelihoods summed, over tokens. Any other aggregate (corpus BLEU, F1 of means, METEOR, a function of its own) is
linearised: a cluster's sum is its share of the aggregate plus what the aggregate loses when the cluster is left out (the
jackknife's influence; Efron and Stein, Annals of Statistics 9, 1981), which for a mean is the same as its sum of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmkv_bench.statistics.metric_kinds import Pooled


@dataclass(frozen=True)
class ClusterSums:
    """values float64 [m]: the methods' aggregates; sums [m, G], sizes [G]: see above (log: of the aggregates' logarithms)."""

    values: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray
    log: bool = False


def cluster_sums(
    scores: np.ndarray, index: np.ndarray, count: int, aggregator: Callable[[np.ndarray], float] | None = None
) -> ClusterSums:
    """The sums of m methods over `count` clusters.

    scores: float64 [m, n], all finite; for a `Pooled` aggregator its parts [m, n, k]. index: int [n], the cluster of each
    sample, from 0 to count - 1, each with a sample. aggregator: None = the mean.
    """
    numbers = np.bincount(index, minlength=count).astype(np.float64)
    if aggregator is None:
        sums = _by_cluster(scores, index, count)
        return ClusterSums(sums.sum(axis=1) / len(index), sums, numbers)
    if not isinstance(aggregator, Pooled):
        return _linearised(*_left_out(scores, index, count, aggregator), numbers)
    parts = _by_cluster(scores, index, count)
    totals = parts.sum(axis=1)
    if not aggregator.ratio:
        values = aggregator.function(totals)
        return _linearised(values, aggregator.function(totals[:, None] - parts), numbers)
    # Methods are scored on the same references, so that their tokens are the same; if not, each counts by its own.
    tokens = parts[..., 1].mean(axis=0)
    level = totals[:, :1] / totals[:, 1:2]
    scale = tokens.sum() / totals[:, 1:2]
    sums = level * tokens + (parts[..., 0] - level * parts[..., 1]) * scale
    return ClusterSums(aggregator.function(totals), sums, tokens, log=True)


def _by_cluster(scores: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Sums of [m, n, ...] over the samples of each cluster, [m, count, ...]."""
    if (index[1:] < index[:-1]).any():
        order = np.argsort(index, kind="stable")
        index, scores = index[order], scores[:, order]
    sizes = np.bincount(index, minlength=count)
    return np.add.reduceat(scores, np.cumsum(sizes) - sizes, axis=1)


def _left_out(
    scores: np.ndarray, index: np.ndarray, count: int, aggregator: Callable[[np.ndarray], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Aggregates [m] and those without each cluster [m, count]."""
    kept = [index != cluster for cluster in range(count)]
    values = np.array([aggregator(own) for own in scores], dtype=np.float64)
    without = np.array([[aggregator(own[mask]) for mask in kept] for own in scores], dtype=np.float64)
    return values, without


def _linearised(values: np.ndarray, without: np.ndarray, numbers: np.ndarray) -> ClusterSums:
    total = numbers.sum()
    influence = (total - numbers) * (values[:, None] - without)
    influence -= influence.sum(axis=1, keepdims=True) * numbers / total
    return ClusterSums(values, values[:, None] * numbers + influence, numbers)

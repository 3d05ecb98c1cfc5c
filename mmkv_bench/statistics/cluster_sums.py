"""Score arrays of a table column, and the sums over clusters from which pairs of methods are compared.

A method's aggregate is (total of its sums) / (total of the sizes). For a mean, a cluster's sum is the sum of its scores
and its size is the number of its samples. Perplexity is summed on the log scale: negative log-likelihoods over tokens.
Any other aggregate (corpus BLEU, F1 of means, METEOR) is linearised: a cluster's sum is its share of the aggregate plus
what the aggregate loses without this cluster (the jackknife's influence; Efron and Stein, Annals of Statistics 9, 1981).
For a mean, this linearised sum equals the sum of scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmkv_bench.statistics.metric_kinds import Pooled

_BLOCK_NUMBERS = 1 << 20  # largest pairs x clusters of a block
_ROUNDING_SHARE = 1e-12  # relative to the largest sum: a smaller difference is only rounding by the order of addition


@dataclass(frozen=True)
class Samples:
    """Scores of m methods on n samples: the input of all comparisons in one column of a table.

    scores    float64 [m, n], seeds averaged within samples, NaN = not ok; for a `Pooled` aggregator the k numbers per sample
              from which it is computed, [m, n, k]
    clusters  any sortable labels [n]
    share     the scores are shares of 1 (`metric_kinds.is_share`): scores of 0 and 1 are failures and successes
    """

    scores: np.ndarray
    clusters: np.ndarray
    aggregator: Pooled | None = None
    share: bool = True

    @cached_property
    def index(self) -> np.ndarray:
        """Cluster number of each sample, int [n] from 0."""
        return np.unique(np.asarray(self.clusters), return_inverse=True)[1].reshape(-1)

    @cached_property
    def by_cluster(self) -> np.ndarray:
        """Positions of the samples, sorted by cluster, int [n]."""
        return np.argsort(self.index, kind="stable")

    @cached_property
    def count(self) -> int:
        """Number of clusters."""
        return int(self.index.max(initial=-1)) + 1

    @cached_property
    def ok(self) -> np.ndarray:
        """Mask of the samples with a score, per method, bool [m, n]."""
        finite = ~np.isnan(self.scores)
        return finite.all(axis=2) if finite.ndim == 3 else finite

    @cached_property
    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """(patterns, of): the distinct rows of `ok`, bool [patterns, n], and for each method the number of its row, int [m]."""
        if self.ok.all():
            return self.ok[:1], np.zeros(len(self.ok), dtype=int)
        distinct, pattern_of_method = np.unique(self.ok, axis=0, return_inverse=True)
        return distinct, pattern_of_method.reshape(-1)

    @property
    def rate(self) -> float | None:
        """Largest possible difference between two methods' scores of one sample: 1 for shares, None for an unbounded scale."""
        return 1.0 if self.share and self.aggregator is None else None

    @cached_property
    def bounded(self) -> np.ndarray:
        """Mask of the methods whose scores are all from 0 to 1, bool [m]; all False for an unbounded scale."""
        if self.rate is None:
            return np.zeros(len(self.scores), dtype=bool)
        return (np.isnan(self.scores) | ((self.scores >= 0) & (self.scores <= 1))).all(axis=1)

    @cached_property
    def binary(self) -> np.ndarray:
        """Mask of the methods whose scores are all 0 or 1, bool [m].

        All False for amounts, for pooled metrics, and unless every sample is a cluster by itself.
        """
        if not self.share or self.aggregator is not None or self.count < len(self.index):
            return np.zeros(len(self.scores), dtype=bool)
        return (np.isnan(self.scores) | (self.scores == 0) | (self.scores == 1)).all(axis=1)


@dataclass(frozen=True)
class Block:
    """Pairs of methods that are compared together, because their arrays fit into memory together."""

    at: np.ndarray  # int [p], positions of the pairs among all pairs of the column
    sums: np.ndarray  # float64 [p, G], differences (a - b) summed within each cluster
    sizes: np.ndarray  # cluster sizes, [p, G], or [1, G] if all equal
    n: np.ndarray  # int [p], number of common samples
    of_a: np.ndarray  # float64 [p], aggregate of method a over these samples
    of_b: np.ndarray  # float64 [p], aggregate of method b over these samples
    log: bool = False  # the sums are of logarithms


def blocks(samples: Samples, a: np.ndarray, b: np.ndarray, pairs: np.ndarray) -> Iterator[Block]:
    """Yield blocks of pairs of methods, with the scores summed by cluster. Pairs without a common sample are left out.

    a, b: int [P], positions of both methods of every pair. pairs: positions in `a` and `b` of the pairs to yield.
    """
    waiting_pieces: list[Block] = []
    waiting_rows = 0
    for block in _pieces(samples, a, b, pairs):
        waiting_pieces.append(block)
        waiting_rows += len(block.at)
        if waiting_rows * samples.count >= _BLOCK_NUMBERS:
            yield _concatenate(waiting_pieces)
            waiting_pieces, waiting_rows = [], 0
    if waiting_pieces:
        yield _concatenate(waiting_pieces)


def _concatenate(parts: Sequence[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]
    sizes = np.concatenate([np.broadcast_to(block.sizes, block.sums.shape) for block in parts])
    pair_numbers, sums, n, of_a, of_b = (
        np.concatenate([getattr(block, name) for block in parts]) for name in ("at", "sums", "n", "of_a", "of_b")
    )
    return Block(pair_numbers, sums, sizes, n, of_a, of_b, parts[0].log)


def _pieces(samples: Samples, a: np.ndarray, b: np.ndarray, pairs: np.ndarray) -> Iterator[Block]:
    """Yield blocks in which all pairs have the same common samples (ok for both methods), split further by size."""
    patterns, pattern = samples.patterns
    lower_pattern, upper_pattern = np.minimum(pattern[a], pattern[b]), np.maximum(pattern[a], pattern[b])
    keys = (lower_pattern * len(patterns) + upper_pattern)[pairs]
    order = np.argsort(keys, kind="stable")
    for alike in np.split(pairs[order], np.flatnonzero(np.diff(keys[order])) + 1):
        if len(alike) == 0:
            continue
        common_samples = patterns[lower_pattern[alike[0]]] & patterns[upper_pattern[alike[0]]]
        if not common_samples.any():
            continue
        members, member_of = np.unique(np.concatenate([a[alike], b[alike]]), return_inverse=True)
        of_members = _cluster_sums(samples, members, common_samples)
        of_a, of_b = member_of[: len(alike)], member_of[len(alike) :]
        smallest_difference = _ROUNDING_SHARE * np.abs(of_members.sums).max()
        pairs_at_once = max(1, _BLOCK_NUMBERS // samples.count)
        for start in range(0, len(alike), pairs_at_once):
            pair_slice = slice(start, start + pairs_at_once)
            sums = of_members.sums[of_a[pair_slice]] - of_members.sums[of_b[pair_slice]]
            sums[np.abs(sums) <= smallest_difference] = 0.0
            n = np.full(len(sums), int(common_samples.sum()))
            values = of_members.values[of_a[pair_slice]], of_members.values[of_b[pair_slice]]
            yield Block(alike[pair_slice], sums, of_members.sizes[None], n, *values, of_members.log)


def _cluster_sums(samples: Samples, members: np.ndarray, common: np.ndarray) -> ClusterSums:
    """Return the scores of the methods `members` summed by cluster over the samples in `common` (bool [n]).

    A cluster without such a sample gets 0.
    """
    order = samples.by_cluster[common[samples.by_cluster]]
    index = samples.index[order]
    has_samples = np.bincount(index, minlength=samples.count) > 0
    if not has_samples.all():
        index = (np.cumsum(has_samples) - 1)[index]
    sums_of_present = cluster_sums(
        samples.scores[members].take(order, axis=1), index, int(has_samples.sum()), samples.aggregator
    )
    if has_samples.all():
        return sums_of_present
    sums, sizes = np.zeros((len(members), samples.count)), np.zeros(samples.count)
    sums[:, has_samples], sizes[has_samples] = sums_of_present.sums, sums_of_present.sizes
    return ClusterSums(sums_of_present.values, sums, sizes, sums_of_present.log)


@dataclass(frozen=True)
class ClusterSums:
    """Scores of m methods summed within G clusters, such that aggregate = sum of `sums` / sum of `sizes`."""

    values: np.ndarray  # float64 [m], the methods' aggregates
    sums: np.ndarray  # float64 [m, G]
    sizes: np.ndarray  # float64 [G]
    log: bool = False  # the sums give the logarithms of the aggregates


def cluster_sums(scores: np.ndarray, index: np.ndarray, count: int, aggregator: Pooled | None = None) -> ClusterSums:
    """Return each method's scores summed within each cluster.

    scores: float64 [m, n], all finite; for a `Pooled` aggregator [m, n, k], as in `Samples`.
    index: int [n], cluster number of each sample, 0 to count - 1; no cluster is empty.
    count: number of clusters.
    aggregator: function that computes the metric from sums; None: the mean.
    """
    samples_per_cluster = np.bincount(index, minlength=count).astype(np.float64)
    if aggregator is None:
        sums = _by_cluster(scores, index, count)
        return ClusterSums(sums.sum(axis=1) / len(index), sums, samples_per_cluster)
    part_sums = _by_cluster(scores, index, count)
    totals = part_sums.sum(axis=1)
    if not aggregator.ratio:
        values = aggregator.function(totals)
        total = samples_per_cluster.sum()
        influence = (total - samples_per_cluster) * (values[:, None] - aggregator.function(totals[:, None] - part_sums))
        influence -= influence.sum(axis=1, keepdims=True) * samples_per_cluster / total
        return ClusterSums(values, values[:, None] * samples_per_cluster + influence, samples_per_cluster)
    # All methods are scored on the same references and so have the same tokens; otherwise each method counts by its own tokens.
    tokens = part_sums[..., 1].mean(axis=0)
    level_of_method = totals[:, :1] / totals[:, 1:2]
    token_scale = tokens.sum() / totals[:, 1:2]
    sums = level_of_method * tokens + (part_sums[..., 0] - level_of_method * part_sums[..., 1]) * token_scale
    return ClusterSums(aggregator.function(totals), sums, tokens, log=True)


def _by_cluster(scores: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Return scores summed over the samples of each cluster: [m, n] -> [m, count], or [m, n, k] -> [m, count, k].

    index: int [n], cluster of each sample; no cluster is empty.
    """
    if (index[1:] < index[:-1]).any():
        order = np.argsort(index, kind="stable")
        index, scores = index[order], scores[:, order]
    sizes = np.bincount(index, minlength=count)
    return np.add.reduceat(scores, np.cumsum(sizes) - sizes, axis=1)

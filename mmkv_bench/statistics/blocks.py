"""The scores of a column's methods, and the sums over clusters of the differences of its pairs, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmkv_bench.statistics.influence import ClusterSums, cluster_sums
from mmkv_bench.statistics.intervals import Aggregator
from mmkv_bench.statistics.metric_kinds import Pooled

_BLOCK = 1 << 20  # entries of pairs x clusters at a time
_ROUNDING = 1e-12  # of the largest sum: what is smaller is a difference of the order of addition


@dataclass(frozen=True)
class Samples:
    """Scores of a column's methods.

    scores    float64 [m, n], seeds averaged within samples, NaN = not ok; for a `Pooled` aggregator the parts [m, n, k]
    clusters  any sortable labels [n]
    share     scores are shares of 1 (`known.is_share`), so that zeros and ones are failures and successes
    """

    scores: np.ndarray
    clusters: np.ndarray
    aggregator: Aggregator | None = None
    share: bool = True

    @cached_property
    def index(self) -> np.ndarray:
        """The cluster of each sample, int [n] from 0."""
        return np.unique(np.asarray(self.clusters), return_inverse=True)[1].reshape(-1)

    @cached_property
    def by_cluster(self) -> np.ndarray:
        """The samples, those of a cluster together, int [n]: of every pair's common samples none are sorted again."""
        return np.argsort(self.index, kind="stable")

    @cached_property
    def count(self) -> int:
        """Number of clusters."""
        return int(self.index.max(initial=-1)) + 1

    @cached_property
    def ok(self) -> np.ndarray:
        """Mask of the samples that each method has, bool [m, n]."""
        known = ~np.isnan(self.scores)
        return known.all(axis=2) if known.ndim == 3 else known

    @cached_property
    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """(the distinct lines of `ok`, which of them is each method's, int [m])."""
        if self.ok.all():
            return self.ok[:1], np.zeros(len(self.ok), dtype=int)
        found, of = np.unique(self.ok, axis=0, return_inverse=True)
        return found, of.reshape(-1)

    @property
    def rate(self) -> float | None:
        """The largest difference of a sample: 1 for means of shares, None where the scale has no end."""
        return 1.0 if self.share and self.aggregator is None else None

    @cached_property
    def bounded(self) -> np.ndarray:
        """Mask of methods whose scores are from 0 to 1 on a scale of shares, bool [m]."""
        if self.rate is None:
            return np.zeros(len(self.scores), dtype=bool)
        return (np.isnan(self.scores) | ((self.scores >= 0) & (self.scores <= 1))).all(axis=1)

    @cached_property
    def binary(self) -> np.ndarray:
        """Mask of methods whose scores are failures and successes of independent samples, bool [m]."""
        if not self.share or self.aggregator is not None or self.count < len(self.index):
            return np.zeros(len(self.scores), dtype=bool)
        return (np.isnan(self.scores) | (self.scores == 0) | (self.scores == 1)).all(axis=1)


@dataclass(frozen=True)
class Block:
    """Some of the pairs: which (`at` int [p]), their differences' sums and sizes over clusters [p, G] (sizes: or [1, G]),
    common samples, aggregates of a and of b over these [p]; log: the sums are of logarithms."""

    at: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray
    n: np.ndarray
    of_a: np.ndarray
    of_b: np.ndarray
    log: bool = False


def blocks(samples: Samples, a: np.ndarray, b: np.ndarray, pairs: np.ndarray) -> Iterator[Block]:
    """The pairs in blocks of bounded size; those without a common sample are left out."""
    waiting: list[Block] = []
    rows = 0
    for block in _pieces(samples, a, b, pairs):
        waiting.append(block)
        rows += len(block.at)
        if rows * samples.count >= _BLOCK:
            yield _joined(waiting)
            waiting, rows = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]

    def rows(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(arrays))

    return Block(
        rows(block.at for block in parts),
        rows(block.sums for block in parts),
        rows(np.broadcast_to(block.sizes, block.sums.shape) for block in parts),
        rows(block.n for block in parts),
        rows(block.of_a for block in parts),
        rows(block.of_b for block in parts),
        parts[0].log,
    )


def _pieces(samples: Samples, a: np.ndarray, b: np.ndarray, pairs: np.ndarray) -> Iterator[Block]:
    """Blocks of pairs that have the same samples in common: all of them, where nothing failed."""
    patterns, pattern = samples.patterns
    lower, upper = np.minimum(pattern[a], pattern[b]), np.maximum(pattern[a], pattern[b])
    keys = (lower * len(patterns) + upper)[pairs]
    order = np.argsort(keys, kind="stable")
    for own in np.split(pairs[order], np.flatnonzero(np.diff(keys[order])) + 1):
        if len(own) == 0:
            continue
        common = patterns[lower[own[0]]] & patterns[upper[own[0]]]
        if not common.any():
            continue
        members, where = np.unique(np.concatenate([a[own], b[own]]), return_inverse=True)
        found = _cluster_sums(samples, members, common)
        of_a, of_b = where[: len(own)], where[len(own) :]
        small = _ROUNDING * np.abs(found.sums).max()
        step = max(1, _BLOCK // samples.count)
        for start in range(0, len(own), step):
            cut = slice(start, start + step)
            sums = found.sums[of_a[cut]] - found.sums[of_b[cut]]
            sums[np.abs(sums) <= small] = 0.0
            n = np.full(len(sums), int(common.sum()))
            values = found.values[of_a[cut]], found.values[of_b[cut]]
            yield Block(own[cut], sums, found.sizes[None], n, *values, found.log)


def _cluster_sums(samples: Samples, members: np.ndarray, common: np.ndarray) -> ClusterSums:
    """Sums over all clusters of the column, 0 in those that hold none of the common samples."""
    pooled = samples.aggregator is None or isinstance(samples.aggregator, Pooled)
    # A function sees the samples in their order.
    own = samples.by_cluster[common[samples.by_cluster]] if pooled else np.flatnonzero(common)
    index = samples.index[own]
    held = np.bincount(index, minlength=samples.count) > 0
    whole = bool(held.all())
    if not whole:
        index = (np.cumsum(held) - 1)[index]
    found = cluster_sums(samples.scores[members].take(own, axis=1), index, int(held.sum()), samples.aggregator)
    if whole:
        return found
    sums, sizes = np.zeros((len(members), samples.count)), np.zeros(samples.count)
    sums[:, held], sizes[held] = found.sums, found.sizes
    return ClusterSums(found.values, sums, sizes, found.log)

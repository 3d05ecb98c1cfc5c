"""The paired test of every table: is the difference of two methods 0, given its sums over clusters of samples?

Arrays: `sums` float64 [P, G], the difference summed within each of G clusters for each of P pairs; `sizes` [P, G] or [1, G],
the number of samples that a cluster adds (tokens for perplexity), 0 if a pair has no sample in the cluster. The estimate is
sum sums / sum sizes. Clusters (an image, a document, a video, a page) are the independent units.

The test is Student's t with the cluster-robust variance, with unseen clusters added to that variance. A method that loses a
little often and wins much rarely may show no win in a small data set; its differences then look certain, and a plain t test
separates equal methods in up to 83 % of families. `UNSEEN` clusters of a usual size, whose every sample differs by
`rate`, half of them for each method, widen the variance by what such an event would have added. `rate` is the largest
possible difference of one sample: 1 for shares. On a scale without an end, `rate` is the largest difference per sample that
the pair shows in any cluster, and `UNSEEN_OPEN` clusters are added, because larger differences than the largest seen are
possible. The result of a pair does not depend on the other methods of a column.

A pair is tested only if no cluster holds more than `LARGEST_SHARE` of its samples (so it has at least 10 clusters). A single
page decides the other pairs, and nothing is claimed about them.

Scores of 0 and 1, with every sample a cluster by itself, are tested by exact McNemar instead, which needs no variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

LARGEST_SHARE = 0.1  # largest part of a pair's samples in one cluster; above it nothing is claimed
UNSEEN, UNSEEN_OPEN = 2.0, 4.0  # clusters added to the variance: on a bounded scale, on a scale without an end


@dataclass(frozen=True)
class PairedTest:
    """The t test of P pairs of methods, from sums over G clusters.

    sums: float64 [P, G], differences summed within clusters. sizes: [P, G], or [1, G] if equal for all pairs.
    rate: largest possible difference of one sample; None if the scale is unbounded. For a pair with a larger observed
    difference, the observed one is used.
    """

    sums: np.ndarray
    sizes: np.ndarray
    rate: float | None = None

    @cached_property
    def _size(self) -> np.ndarray:
        return self.sizes.sum(axis=1) * np.ones(len(self.sums))

    @cached_property
    def clusters(self) -> np.ndarray:
        """Number of clusters in which a pair has samples, int [P]."""
        return np.count_nonzero(self.sizes, axis=1) * np.ones(len(self.sums), dtype=int)

    @cached_property
    def decidable(self) -> np.ndarray:
        """Mask of the pairs in which no cluster holds more than `LARGEST_SHARE` of the samples, bool [P]."""
        largest = self.sizes.max(axis=1, initial=0.0) * np.ones(len(self.sums))
        return (self._size > 0) & (largest <= LARGEST_SHARE * self._size * (1 + 1e-9))

    @cached_property
    def difference(self) -> np.ndarray:
        """Estimated difference, float64 [P]."""
        return self.sums.sum(axis=1) / np.maximum(self._size, np.finfo(float).tiny)

    @cached_property
    def error(self) -> np.ndarray:
        """Standard error of the estimated difference with the unseen clusters, float64 [P]."""
        squares = (self.sizes**2).sum(axis=1)
        # Summed line by line, so that a pair's numbers do not depend on the number of pairs tested together.
        residuals = ((self.sums - self.difference[:, None] * self.sizes) ** 2).sum(axis=1)
        count = np.maximum(self.clusters, 2)
        unseen = self._largest**2 * squares / count * (UNSEEN_OPEN if self.rate is None else UNSEEN)
        variance = (residuals + unseen) * count / (count - 1)
        return np.sqrt(variance) / np.maximum(self._size, np.finfo(float).tiny)

    @property
    def _largest(self) -> np.ndarray:
        rates = np.divide(np.abs(self.sums), self.sizes, out=np.zeros_like(self.sums), where=self.sizes > 0)
        return rates.max(axis=1, initial=self.rate or 0.0)

    @cached_property
    def p(self) -> np.ndarray:
        """Two-sided p-values of no difference, float64 [P]; 1 for a pair that is not decidable."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            statistic = np.where(self.difference == 0, 0.0, np.abs(self.difference) / self.error)
        return np.where(self.decidable, 2 * stdtr(np.maximum(self.clusters - 1, 1), -statistic), 1.0)

    def critical(self, alpha: np.ndarray | float) -> np.ndarray:
        """Return the difference [P] whose p-value is alpha: half the width of the interval at level 1 - alpha. NaN for a pair
        that is not decidable. 0 if two methods are the same on a scale without an end: such a pair proves nothing."""
        from scipy.special import stdtrit

        quantile = -stdtrit(np.maximum(self.clusters - 1, 1), np.asarray(alpha) / 2)
        return np.where(self.decidable, quantile * self.error, np.nan)

    def ends(self, alpha: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends [P] of the intervals at level 1 - alpha, which exclude 0 exactly if p < alpha; NaN for a pair that is
        not decidable."""
        half = self.critical(alpha)
        return self.difference - half, self.difference + half


@dataclass(frozen=True)
class McNemar:
    """McNemar's exact test of P pairs of methods with scores of 0 and 1. It looks only at samples that exactly one method
    answers right. If the methods are equally good, either one is right with probability 1/2.

    only_a, only_b: int [P], samples right in one method only. n: int [P], common samples of the pair.
    """

    only_a: np.ndarray
    only_b: np.ndarray
    n: np.ndarray

    @property
    def p(self) -> np.ndarray:
        """Two-sided p-values float64 [P], twice the smaller tail; 1 if no sample is discordant."""
        from scipy.special import bdtr

        return np.minimum(1.0, 2 * bdtr(np.minimum(self.only_a, self.only_b), self.only_a + self.only_b, 0.5))

    def ends(self, alpha: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends [P] of the difference's interval at level 1 - alpha, given the number of discordant samples (Clopper
        and Pearson, 1934). The interval excludes 0 exactly if p < alpha."""
        from scipy.special import betaincinv

        half = np.asarray(alpha) / 2 * np.ones(len(self.n))
        a, b = self.only_a.astype(float), self.only_b.astype(float)
        low = np.where(a > 0, betaincinv(np.maximum(a, 1), b + 1, half), 0.0)
        high = np.where(b > 0, betaincinv(a + 1, np.maximum(b, 1), 1 - half), 1.0)
        share = (a + b) / np.maximum(self.n, 1)
        return share * (2 * low - 1), share * (2 * high - 1)

    def critical(self, alpha: np.ndarray | float) -> np.ndarray:
        """Return the smallest difference [P] with a p-value of at most alpha, given the number of discordant samples; infinite if
        these are too few."""
        from scipy.special import bdtrik

        count = (self.only_a + self.only_b).astype(float)
        fewest = np.ceil(1 - np.log2(np.asarray(alpha))) * np.ones(len(self.n))
        with np.errstate(invalid="ignore"):
            most = np.floor(bdtrik(np.asarray(alpha) / 2, np.maximum(count, 1), 0.5) + 1e-9)
        gap = np.where(count >= fewest, count - 2 * np.maximum(most, 0), np.inf)
        return gap / np.maximum(self.n, 1)

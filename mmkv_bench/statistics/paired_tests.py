"""Tests of all pairs in one column of a table: methods at one budget, compared by one metric.

separated  two methods differ by Holm's step-down correction (1979) over all pairs of the column
best       no other method is proven better; the truly best method is among these. A method is out if another beats it at
           p <= alpha / (m - 1), or in a separated pair. The first test is single-step, against each of m - 1 competitors, as
           in Hsu's multiple comparisons with the best (Annals of Statistics 9, 1981)
ranks      from 1 + the number of methods that beat this one, to m - the number of methods that it beats ("beats" as for `best`)

docs/statistics.md says how often these statements are true; `make simulate` counts it.

The paired test asks whether the difference of two methods is 0, given its sums over clusters (an image, a document, a
video, a page), which are the independent units. Arrays: `sums` float64 [P, G], the difference summed within each of G
clusters for each of P pairs; `sizes` [P, G] or [1, G], the number of samples that a cluster adds (tokens for perplexity),
0 if a pair has no sample in the cluster. The estimate is sum sums / sum sizes.

The test is Student's t with the cluster-robust variance, with unseen clusters added to that variance. A method that often
loses a little and rarely wins a lot may show no win in a small data set; its differences then look certain, and a plain t
test separates equal methods in up to 83 % of families. `UNSEEN` clusters of a usual size, whose every sample differs by
`rate`, half of them for each method, widen the variance by what such an event would have added. `rate` is the largest
possible difference of one sample: 1 for shares. On a scale without an end, `rate` is the largest difference per sample that
the pair shows in any cluster, and `UNSEEN_OPEN` clusters are added, because larger differences than the largest seen are
possible. The result of a pair does not depend on the other methods of a column.

A pair is tested only if no cluster holds more than `LARGEST_SHARE` of its samples (so it has at least 10 clusters). A single
cluster decides the other pairs, and nothing is claimed about them.

Scores of 0 and 1, with every sample a cluster by itself, are tested by exact McNemar instead, which needs no variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmkv_bench.statistics.cluster_sums import Block, Samples, blocks
from mmkv_bench.statistics.intervals import ALPHA

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
        """Mask of the pairs in which no cluster has more than `LARGEST_SHARE` of the samples, bool [P]; only these are tested."""
        largest = self.sizes.max(axis=1, initial=0.0) * np.ones(len(self.sums))
        return (self._size > 0) & (largest <= LARGEST_SHARE * self._size * (1 + 1e-9))

    @cached_property
    def difference(self) -> np.ndarray:
        """Estimated difference of each pair, float64 [P]."""
        return self.sums.sum(axis=1) / np.maximum(self._size, np.finfo(float).tiny)

    @cached_property
    def error(self) -> np.ndarray:
        """Standard error of the estimated differences, float64 [P], including the variance of clusters that were not seen."""
        squares = (self.sizes**2).sum(axis=1)
        # Summed line by line, so that a pair's numbers do not depend on the number of pairs tested together.
        residuals = ((self.sums - self.difference[:, None] * self.sizes) ** 2).sum(axis=1)
        cluster_count = np.maximum(self.clusters, 2)
        unseen_variance = self._largest**2 * squares / cluster_count * (UNSEEN_OPEN if self.rate is None else UNSEEN)
        variance = (residuals + unseen_variance) * cluster_count / (cluster_count - 1)
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
        """Return each pair's difference whose p-value is alpha, float64 [P]: half the width of the interval at level 1 - alpha.

        NaN for a pair that is not `decidable`. 0 for methods with equal scores on an unbounded scale; such a 0 proves nothing.
        """
        from scipy.special import stdtrit

        quantile = -stdtrit(np.maximum(self.clusters - 1, 1), np.asarray(alpha) / 2)
        return np.where(self.decidable, quantile * self.error, np.nan)

    def ends(self, alpha: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Return (lower, upper) ends [P] of the intervals of the differences at level 1 - alpha; NaN for an undecidable pair.

        An interval excludes 0 exactly if p < alpha.
        """
        half = self.critical(alpha)
        return self.difference - half, self.difference + half


@dataclass(frozen=True)
class McNemar:
    """McNemar's exact test of P pairs of methods with scores of 0 and 1, from the samples that exactly one method gets right.

    If the methods are equally good, either one is right in such a sample with probability 1/2. `ends` and `critical` take the
    number of these samples as fixed.

    only_a, only_b: int [P], samples right in one method only. n: int [P], common samples of the pair.
    """

    only_a: np.ndarray
    only_b: np.ndarray
    n: np.ndarray

    @property
    def p(self) -> np.ndarray:
        """Two-sided p-values, float64 [P], twice the smaller tail; 1 if no sample is right in exactly one method."""
        from scipy.special import bdtr

        return np.minimum(1.0, 2 * bdtr(np.minimum(self.only_a, self.only_b), self.only_a + self.only_b, 0.5))

    def ends(self, alpha: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Return (lower, upper) ends [P] of the intervals of the differences at level 1 - alpha (Clopper and Pearson, 1934).

        An interval excludes 0 exactly if p < alpha.
        """
        from scipy.special import betaincinv

        half = np.asarray(alpha) / 2 * np.ones(len(self.n))
        a, b = self.only_a.astype(float), self.only_b.astype(float)
        low = np.where(a > 0, betaincinv(np.maximum(a, 1), b + 1, half), 0.0)
        high = np.where(b > 0, betaincinv(a + 1, np.maximum(b, 1), 1 - half), 1.0)
        share = (a + b) / np.maximum(self.n, 1)
        return share * (2 * low - 1), share * (2 * high - 1)

    def critical(self, alpha: np.ndarray | float) -> np.ndarray:
        """Return the smallest difference [P] with a p-value of at most alpha; infinite if too few samples differ."""
        from scipy.special import bdtrik

        count = (self.only_a + self.only_b).astype(float)
        fewest_differing = np.ceil(1 - np.log2(np.asarray(alpha))) * np.ones(len(self.n))
        with np.errstate(invalid="ignore"):
            most_losses = np.floor(bdtrik(np.asarray(alpha) / 2, np.maximum(count, 1), 0.5) + 1e-9)
        least_gap = np.where(count >= fewest_differing, count - 2 * np.maximum(most_losses, 0), np.inf)
        return least_gap / np.maximum(self.n, 1)


@dataclass(frozen=True)
class Column:
    """Tested pairs of a column of m methods.

    names       method names [m]
    a, b        positions of both methods of each pair in `names`, int [P]
    n, clusters numbers of the pair's common samples, and of the clusters that contain them, int [P]
    difference  score of `a` minus score of `b` over the common samples, float64 [P]
    p           p-value of the paired test, float64 [P]
    decidable   mask of the pairs that are tested (see the module), bool [P]
    falling     smaller values are better
    """

    names: tuple[str, ...]
    samples: Samples
    a: np.ndarray
    b: np.ndarray
    n: np.ndarray
    clusters: np.ndarray
    difference: np.ndarray
    p: np.ndarray
    decidable: np.ndarray
    falling: bool = False

    @cached_property
    def _holm(self) -> tuple[np.ndarray, np.ndarray]:
        return holm(self.p)

    @property
    def adjusted(self) -> np.ndarray:
        """p-values of the pairs with Holm's correction over the column [P]."""
        return self._holm[0]

    @property
    def level(self) -> np.ndarray:
        """Significance level with which Holm's procedure compares each p-value [P]; a pair is separated if p <= level."""
        return self._holm[1]

    @property
    def separated(self) -> np.ndarray:
        """Mask of the pairs that are proven different by Holm's procedure over the column, bool [P]."""
        return self.p <= self.level

    @property
    def a_better(self) -> np.ndarray:
        """Mask of the pairs in which `a` scored better than `b`, proven or not, bool [P]."""
        return (self.difference > 0) != self.falling

    @cached_property
    def beats(self) -> np.ndarray:
        """Proven wins, bool [m, m]: the method of the row is better than the method of the column of this array."""
        return self._beats(np.arange(len(self.p)), ALPHA, len(self.names))

    def _beats(self, pairs: np.ndarray, alpha: float, m: int) -> np.ndarray:
        """Return the proven wins among m methods, bool [names, names]. pairs: positions of all pairs of these m methods."""
        a, b, p, a_better = self.a[pairs], self.b[pairs], self.p[pairs], self.a_better[pairs]
        is_proven = (p <= holm(p, alpha)[1]) | (p <= alpha / max(m - 1, 1))
        wins = np.zeros((len(self.names), len(self.names)), dtype=bool)
        wins[a, b] = is_proven & a_better
        wins[b, a] = is_proven & ~a_better
        return wins

    @cached_property
    def best(self) -> np.ndarray:
        """Mask of the methods to which no other method is proven superior, bool [m]."""
        return np.logical_not(self.beats.any(axis=0))

    @cached_property
    def winners(self) -> tuple[str, ...]:
        """Names of the methods in `best`."""
        return tuple(name for name, best in zip(self.names, self.best.tolist(), strict=True) if best)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Lowest and highest possible rank of each method, int [m, 2]; 1 is the best."""
        return _ranks(self.beats)

    def ranks_among(self, names: Sequence[str], alpha: float) -> np.ndarray:
        """Return the lowest and highest possible rank of the methods `names` among themselves, int [len(names), 2].

        With confidence 1 - alpha all true ranks are within these.
        """
        method_numbers = [self.names.index(name) for name in names]
        pairs = np.flatnonzero(np.isin(self.a, method_numbers) & np.isin(self.b, method_numbers))
        return _ranks(self._beats(pairs, alpha, len(method_numbers))[np.ix_(method_numbers, method_numbers)])

    def intervals(self, pairs: np.ndarray | None = None, alpha: np.ndarray | float | None = None) -> np.ndarray:
        """Return the ends of the differences' confidence intervals, float64 [len(pairs), 2]; NaN for an undecidable pair.

        pairs: positions of the pairs; None: all.
        alpha: one number, or one per pair; None: Holm's level, at which an interval excludes 0 exactly if the pair is
            separated.
        """
        pairs = np.arange(len(self.p)) if pairs is None else np.asarray(pairs)
        alpha = self.level[pairs] if alpha is None else np.broadcast_to(alpha, len(pairs))
        alphas = np.full(len(self.p), np.nan)
        alphas[pairs] = alpha
        interval_ends = np.full((len(self.p), 2), np.nan)
        for block in blocks(self.samples, self.a, self.b, pairs):
            block_ends = _ends(self.samples, self, block, alphas[block.at])
            if block.log:  # exact for the estimate, and (b, a) is minus (a, b)
                block_ends = 2 * np.sqrt(block.of_a * block.of_b)[:, None] * np.sinh(block_ends / 2)
            interval_ends[block.at] = block_ends
        is_bounded = self.samples.bounded[self.a] & self.samples.bounded[self.b]
        interval_ends[is_bounded] = np.clip(interval_ends[is_bounded], -1.0, 1.0)
        return interval_ends[pairs]

    @cached_property
    def resolution(self) -> float | None:
        """Smallest difference that would have separated at least one pair, at Holm's first level (alpha / number of pairs).

        It is on the log scale for perplexity; None if no pair is decidable, infinite if no difference would be enough.
        """
        pairs = np.flatnonzero(self.decidable)
        if not len(pairs):
            return None
        smallest = np.inf
        for block in blocks(self.samples, self.a, self.b, pairs):
            test = _test(self.samples, block)
            gaps = test.critical(ALPHA / len(self.p))
            gaps[test.error == 0] = np.inf  # both methods gave the same answers to all samples
            binary = _binary(self.samples, self.a, self.b, block)
            gaps[binary] = _mcnemar(block, binary).critical(ALPHA / len(self.p))
            smallest = min(smallest, float(gaps.min()))
        return smallest


def _ranks(beats: np.ndarray) -> np.ndarray:
    return np.stack([1 + beats.sum(axis=0), len(beats) - beats.sum(axis=1)], axis=1)


def compare_column(names: Sequence[str], samples: Samples, *, falling: bool = False) -> Column:
    """Test all pairs of methods, each over the samples that are ok in both. falling: smaller values are better."""
    return compare_pairs(names, samples, *np.triu_indices(len(names), 1), falling=falling)


def compare_pairs(
    names: Sequence[str], samples: Samples, a: np.ndarray, b: np.ndarray, *, falling: bool = False
) -> Column:
    """Test only the given pairs; a pair's numbers do not depend on the other pairs.

    a, b: positions of both methods in `names`, int [P]. falling: smaller values are better.
    """
    pair_count = len(a)
    n, clusters = np.zeros(pair_count, dtype=int), np.zeros(pair_count, dtype=int)
    difference, p, decidable = np.full(pair_count, np.nan), np.ones(pair_count), np.zeros(pair_count, dtype=bool)
    for block in blocks(samples, a, b, np.arange(pair_count)):
        test = _test(samples, block)
        n[block.at], difference[block.at] = block.n, block.of_a - block.of_b
        clusters[block.at], decidable[block.at], p[block.at] = test.clusters, test.decidable, test.p
        binary = _binary(samples, a, b, block)
        p[block.at[binary]] = np.where(test.decidable[binary], _mcnemar(block, binary).p, 1.0)
    return Column(tuple(names), samples, a, b, n, clusters, difference, p, decidable, falling)


def _test(samples: Samples, block: Block) -> PairedTest:
    return PairedTest(block.sums, block.sizes, samples.rate)


def _binary(samples: Samples, a: np.ndarray, b: np.ndarray, block: Block) -> np.ndarray:
    """Return the positions, within the block, of the pairs to which exact McNemar applies: both methods score 0 or 1."""
    return np.flatnonzero(samples.binary[a[block.at]] & samples.binary[b[block.at]])


def _mcnemar(block: Block, which: np.ndarray) -> McNemar:
    return McNemar((block.sums[which] > 0).sum(axis=1), (block.sums[which] < 0).sum(axis=1), block.n[which])


def _ends(samples: Samples, column: Column, block: Block, alpha: np.ndarray) -> np.ndarray:
    """Return the ends [p, 2] of a block's confidence intervals at levels 1 - alpha.

    For scores of 0 and 1, each end is the wider of the t interval's and McNemar's, because McNemar takes the number of
    differing samples as fixed, although it varies. Whether 0 is inside follows McNemar, as the p-value does.
    """
    test = _test(samples, block)
    low, high = test.ends(alpha)
    binary = _binary(samples, column.a, column.b, block)
    mcnemar_low, mcnemar_high = _mcnemar(block, binary).ends(alpha[binary])
    wide_low, wide_high = low[binary], high[binary]
    low[binary] = np.where((mcnemar_low > 0) & (wide_low <= 0), mcnemar_low, np.minimum(mcnemar_low, wide_low))
    high[binary] = np.where((mcnemar_high < 0) & (wide_high >= 0), mcnemar_high, np.maximum(mcnemar_high, wide_high))
    return np.stack([low, high], axis=1)


def holm(p: np.ndarray, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray]:
    """Return (adjusted p-values, levels) of Holm's step-down correction of p-values [P].

    The k-th smallest of m p-values is compared with the level alpha / (m - k + 1). At the first one above its level the
    procedure ends, and the remaining hypotheses keep that step's level. So an interval at `level` never contradicts the
    decision.
    """
    m = len(p)
    order = np.argsort(p, kind="stable")
    steps = np.arange(m, 0, -1)
    levels = alpha / steps
    is_retained = p[order] > levels
    if is_retained.any():
        first_retained = int(np.argmax(is_retained))
        levels[first_retained:] = levels[first_retained]
    adjusted, level = np.empty(m), np.empty(m)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, steps * p[order]))
    level[order] = levels
    return adjusted, level

"""Tests of all pairs in one column of a table: methods at one budget, compared by one metric.

separated  two methods differ by Holm's step-down correction (1979) over all pairs of the column
best       no other method is proven better; the truly best method is among these. A method is out if another beats it at
           p <= alpha / (m - 1), or in a separated pair. The first test is single-step, against each of m - 1 competitors, as
           in Hsu's multiple comparisons with the best (Annals of Statistics 9, 1981)
ranks      from 1 + the number of methods that beat this one, to m - the number of methods that it beats ("beats" as for `best`)

docs/statistics.md says how often these statements are true; `make simulate` counts it. Nothing is claimed about a pair if a
single cluster holds too large a part of its samples (see `paired_test`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmkv_bench.statistics.blocks import Block, Samples, blocks
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.paired_test import McNemar, PairedTest


@dataclass(frozen=True)
class Column:
    """Tested pairs of a column of m methods.

    names       method names [m]
    a, b        positions of both methods of each pair in `names`, int [P]
    n, clusters numbers of the pair's common samples, and of the clusters that contain them, int [P]
    difference  score of `a` minus score of `b` over the common samples, float64 [P]
    p           p-value of the paired test, float64 [P]
    decidable   mask of the pairs that are tested (see `paired_test`), bool [P]
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
        """Holm's adjusted p-values [P]."""
        return self._holm[0]

    @property
    def level(self) -> np.ndarray:
        """Significance level of each p-value by Holm's procedure [P]: a pair is separated if p <= level."""
        return self._holm[1]

    @property
    def separated(self) -> np.ndarray:
        """Mask of the pairs that differ, by Holm's procedure over the column, bool [P]."""
        return self.p <= self.level

    @property
    def a_better(self) -> np.ndarray:
        """Mask of pairs in which `a` scored better than `b`, proven or not, bool [P]."""
        return (self.difference > 0) != self.falling

    @cached_property
    def beats(self) -> np.ndarray:
        """Proven wins, bool [m, m]: the method of the row is better than the method of the column."""
        return self._beats(np.arange(len(self.p)), ALPHA, len(self.names))

    def _beats(self, pairs: np.ndarray, alpha: float, m: int) -> np.ndarray:
        """Return the proven wins among m methods, bool [names, names]. pairs: positions of all pairs of these methods."""
        a, b, p, a_better = self.a[pairs], self.b[pairs], self.p[pairs], self.a_better[pairs]
        proven = (p <= holm(p, alpha)[1]) | (p <= alpha / max(m - 1, 1))
        wins = np.zeros((len(self.names), len(self.names)), dtype=bool)
        wins[a, b] = proven & a_better
        wins[b, a] = proven & ~a_better
        return wins

    @cached_property
    def best(self) -> np.ndarray:
        """Mask of the methods that no other method is proven better than, bool [m]."""
        return np.logical_not(self.beats.any(axis=0))

    @cached_property
    def winners(self) -> tuple[str, ...]:
        """Names of the methods in `best`."""
        return tuple(name for name, best in zip(self.names, self.best.tolist(), strict=True) if best)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Lowest and highest possible rank of each method, int [m, 2]."""
        return _ranks(self.beats)

    def ranks_among(self, names: Sequence[str], alpha: float) -> np.ndarray:
        """Rank the methods `names` among themselves, int [len(names), 2]. All true ranks are within these at 1 - alpha."""
        places = [self.names.index(name) for name in names]
        pairs = np.flatnonzero(np.isin(self.a, places) & np.isin(self.b, places))
        return _ranks(self._beats(pairs, alpha, len(places))[np.ix_(places, places)])

    def intervals(self, pairs: np.ndarray | None = None, alpha: np.ndarray | float | None = None) -> np.ndarray:
        """Return the ends of the differences' confidence intervals, float64 [len(pairs), 2]; NaN for a pair that is not
        decidable.

        pairs: positions of the pairs; None = all. alpha: one number, or one per pair; None = Holm's level, at which an interval
        excludes 0 exactly if the pair is separated.
        """
        pairs = np.arange(len(self.p)) if pairs is None else np.asarray(pairs)
        alpha = self.level[pairs] if alpha is None else np.broadcast_to(alpha, len(pairs))
        alphas = np.full(len(self.p), np.nan)
        alphas[pairs] = alpha
        ends = np.full((len(self.p), 2), np.nan)
        for block in blocks(self.samples, self.a, self.b, pairs):
            block_ends = _ends(self.samples, self, block, alphas[block.at])
            if block.log:  # exact for the estimate, and (b, a) is minus (a, b)
                block_ends = 2 * np.sqrt(block.of_a * block.of_b)[:, None] * np.sinh(block_ends / 2)
            ends[block.at] = block_ends
        within = self.samples.bounded[self.a] & self.samples.bounded[self.b]
        ends[within] = np.clip(ends[within], -1.0, 1.0)
        return ends[pairs]

    @cached_property
    def resolution(self) -> float | None:
        """Smallest difference that would have separated at least one pair of the column, tested at Holm's first level (alpha /
        number of pairs). It is on the log scale for perplexity. None if no pair is decidable; infinite if no difference is
        enough."""
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
    """Test all pairs of methods. A pair is compared over the samples that are ok in both."""
    return compare_pairs(names, samples, *np.triu_indices(len(names), 1), falling=falling)


def compare_pairs(
    names: Sequence[str], samples: Samples, a: np.ndarray, b: np.ndarray, *, falling: bool = False
) -> Column:
    """Test the given pairs; a pair's numbers do not depend on other pairs. a, b: positions in `names`, int [P]."""
    count = len(a)
    n, clusters = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
    difference, p, decidable = np.full(count, np.nan), np.ones(count), np.zeros(count, dtype=bool)
    for block in blocks(samples, a, b, np.arange(count)):
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
    discordant samples as fixed, although it varies. But whether 0 is inside follows McNemar, as the p-value does."""
    test = _test(samples, block)
    low, high = test.ends(alpha)
    binary = _binary(samples, column.a, column.b, block)
    least, most = _mcnemar(block, binary).ends(alpha[binary])
    wide_low, wide_high = low[binary], high[binary]
    low[binary] = np.where((least > 0) & (wide_low <= 0), least, np.minimum(least, wide_low))
    high[binary] = np.where((most < 0) & (wide_high >= 0), most, np.maximum(most, wide_high))
    return np.stack([low, high], axis=1)


def holm(p: np.ndarray, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray]:
    """Return Holm's step-down correction of p-values [P]: (adjusted p-values, level that each p-value is compared with).

    The k-th smallest of m p-values is compared with alpha / (m - k + 1). The first that fails ends the procedure, and the
    remaining hypotheses keep that step's level, so an interval at `level` never contradicts the decision.
    """
    m = len(p)
    order = np.argsort(p, kind="stable")
    steps = np.arange(m, 0, -1)
    levels = alpha / steps
    failed = p[order] > levels
    if failed.any():
        first = int(np.argmax(failed))
        levels[first:] = levels[first]
    adjusted, level = np.empty(m), np.empty(m)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, steps * p[order]))
    level[order] = levels
    return adjusted, level

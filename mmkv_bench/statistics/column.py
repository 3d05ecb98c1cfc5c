"""One column of a table: methods at one budget by one metric, every two of them tested, and what may be said of them.

separated  two methods differ, by Holm's step-down correction (1979) over all pairs of the column
best       the methods of which no other is proven better; the truly best one is among them. A method is out when another
           beats it at p <= alpha / (m - 1): each against its m - 1 competitors and without steps, as in Hsu's multiple
           comparisons with the best (Annals of Statistics 9, 1981); or in a separated pair
ranks      1 + the number of methods that beat it so, to m - the number that it beats so

docs/statistics.md says how often each holds; `make simulate` counts. A column is not decidable where a single cluster holds
too large a part of the samples of all its pairs (see `paired_test`).
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
    """Every two methods of a column and their difference, score of `a` minus score of `b`, over their common samples.

    names     the methods' [m]
    a, b      their positions [P], and of each pair: n common samples, clusters these come from, difference, p-value
    decidable whether a pair is tested (see `paired_test`), bool [P]
    falling   the smaller value is the better one
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
        """The level [P] at which Holm's procedure holds each p-value: separated where p <= level."""
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
        """Proven wins, bool [m, m]: the method of the row is better than that of the column."""
        return self._beats(np.arange(len(self.p)), ALPHA, len(self.names))

    def _beats(self, pairs: np.ndarray, alpha: float, m: int) -> np.ndarray:
        """Proven wins among m methods, of which these are all pairs; bool [names, names]."""
        a, b, p, a_better = self.a[pairs], self.b[pairs], self.p[pairs], self.a_better[pairs]
        proven = (p <= holm(p, alpha)[1]) | (p <= alpha / max(m - 1, 1))
        wins = np.zeros((len(self.names), len(self.names)), dtype=bool)
        wins[a, b] = proven & a_better
        wins[b, a] = proven & ~a_better
        return wins

    @cached_property
    def best(self) -> np.ndarray:
        """Methods of which no other is proven better, bool [m]."""
        return np.logical_not(self.beats.any(axis=0))

    @cached_property
    def winners(self) -> tuple[str, ...]:
        """The names of `best`."""
        return tuple(name for name, best in zip(self.names, self.best.tolist(), strict=True) if best)

    @cached_property
    def ranks(self) -> np.ndarray:
        """From and to, int [m, 2]."""
        return _ranks(self.beats)

    def ranks_among(self, names: Sequence[str], alpha: float) -> np.ndarray:
        """Ranks among some of the methods, in their order, int [len(names), 2]; all true ones are within at 1 - alpha."""
        places = [self.names.index(name) for name in names]
        pairs = np.flatnonzero(np.isin(self.a, places) & np.isin(self.b, places))
        return _ranks(self._beats(pairs, alpha, len(places))[np.ix_(places, places)])

    def intervals(self, pairs: np.ndarray | None = None, alpha: np.ndarray | float | None = None) -> np.ndarray:
        """Ends of the differences' intervals float64 [len(pairs), 2]; of all pairs unless positions are given.

        alpha: one number or one for each of the pairs; None = Holm's level, at which an interval excludes 0 exactly where
        the pair is separated. NaN where a pair is not decidable.
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
        """The smallest difference that some pair of the column would have been separated at, were it alone above Holm's first
        level (on the log scale for perplexity); None where no pair is decidable, infinite where no difference is."""
        pairs = np.flatnonzero(self.decidable)
        if not len(pairs):
            return None
        smallest = np.inf
        for block in blocks(self.samples, self.a, self.b, pairs):
            test = _test(self.samples, block)
            gaps = test.critical(ALPHA / len(self.p))
            gaps[test.error == 0] = np.inf  # the same answers throughout
            binary = _binary(self.samples, self.a, self.b, block)
            gaps[binary] = _mcnemar(block, binary).critical(ALPHA / len(self.p))
            smallest = min(smallest, float(gaps.min()))
        return smallest


def _ranks(beats: np.ndarray) -> np.ndarray:
    return np.stack([1 + beats.sum(axis=0), len(beats) - beats.sum(axis=1)], axis=1)


def compare_column(names: Sequence[str], samples: Samples, *, falling: bool = False) -> Column:
    """Test every two methods over the samples that are ok in both."""
    return compare_pairs(names, samples, *np.triu_indices(len(names), 1), falling=falling)


def compare_pairs(
    names: Sequence[str], samples: Samples, a: np.ndarray, b: np.ndarray, *, falling: bool = False
) -> Column:
    """Test some pairs; the numbers of a pair depend on no other one. a, b: positions in `names`, int [P]."""
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
    """Positions in a block of the pairs that are tested by exact McNemar."""
    return np.flatnonzero(samples.binary[a[block.at]] & samples.binary[b[block.at]])


def _mcnemar(block: Block, which: np.ndarray) -> McNemar:
    return McNemar((block.sums[which] > 0).sum(axis=1), (block.sums[which] < 0).sum(axis=1), block.n[which])


def _ends(samples: Samples, column: Column, block: Block, alpha: np.ndarray) -> np.ndarray:
    """Ends [p, 2] of a block's intervals. Those of zeros and ones are the wider of both tests' at either side, for given
    their number discordant samples vary less than they do; 0 is in or out by exact McNemar alone."""
    test = _test(samples, block)
    low, high = test.ends(alpha)
    binary = _binary(samples, column.a, column.b, block)
    least, most = _mcnemar(block, binary).ends(alpha[binary])
    wide_low, wide_high = low[binary], high[binary]
    low[binary] = np.where((least > 0) & (wide_low <= 0), least, np.minimum(least, wide_low))
    high[binary] = np.where((most < 0) & (wide_high >= 0), most, np.maximum(most, wide_high))
    return np.stack([low, high], axis=1)


def holm(p: np.ndarray, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray]:
    """Holm's step-down correction of p-values [P]: (adjusted p-values, the level that each is held against).

    The k-th smallest of m is held against alpha / (m - k + 1); the first that fails ends the procedure, and the remaining
    hypotheses keep that step's level, so that an interval at `level` never contradicts the decision.
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

"""One column of a table: methods at one budget by one metric, every two of them tested, and what may be said of them.

separated  two methods differ, by Holm's step-down correction (1979) over all pairs of the column
best       the methods of which no rival is proven better; the truly best one is among them. A method is out when a rival
           beats it at p <= alpha / (m - 1): each against its m - 1 rivals and without steps, as in Hsu's multiple
           comparisons with the best (Annals of Statistics 9, 1981); or in a separated pair
ranks      1 + the number of methods that beat it so, to m - the number that it beats so

Each holds in at least 95 % of columns; `make simulate` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmkv_bench.statistics.blocks import Samples, blocks
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.paired_test import LEAST, paired_ends, paired_p


@dataclass(frozen=True)
class Column:
    """Every two methods of a column and their difference, score of `a` minus score of `b`, over their common samples.

    names     the methods' [m]
    a, b      their positions [P], and of each pair: n common samples, clusters these come from, difference, p-value
    largest   the adverse cluster of the test (see `paired_test`), [P]
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
    largest: np.ndarray
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
        """Which pairs differ, by Holm's procedure over the column, bool [P]."""
        return self.p <= self.level

    @property
    def a_better(self) -> np.ndarray:
        """Whether `a` scored better than `b`, proven or not, bool [P]."""
        return (self.difference > 0) != self.falling

    @cached_property
    def beats(self) -> np.ndarray:
        """Who beats whom: bool [m, m], line better than column."""
        return self._beats(np.arange(len(self.p)), ALPHA, len(self.names))

    def _beats(self, pairs: np.ndarray, alpha: float, m: int) -> np.ndarray:
        """Who is proven better of m methods, of which these are all pairs; bool [names, names]."""
        a, b, p, a_better = self.a[pairs], self.b[pairs], self.p[pairs], self.a_better[pairs]
        proven = (p <= holm(p, alpha)[1]) | (p <= alpha / max(m - 1, 1))
        found = np.zeros((len(self.names), len(self.names)), dtype=bool)
        found[a, b] = proven & a_better
        found[b, a] = proven & ~a_better
        return found

    @cached_property
    def best(self) -> np.ndarray:
        """Methods of which no rival is proven better, bool [m]."""
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
        own = [self.names.index(name) for name in names]
        pairs = np.flatnonzero(np.isin(self.a, own) & np.isin(self.b, own))
        return _ranks(self._beats(pairs, alpha, len(own))[np.ix_(own, own)])

    def intervals(self, pairs: np.ndarray | None = None, alpha: np.ndarray | float | None = None) -> np.ndarray:
        """Ends of the differences' intervals float64 [len(pairs), 2]; of all pairs unless positions are given.

        alpha: one number or one for each of the pairs; None = Holm's level, at which an interval excludes 0 exactly where
        the pair is separated. NaN where nothing is claimed, infinite where no difference would be rejected.
        """
        pairs = np.arange(len(self.p)) if pairs is None else np.asarray(pairs)
        alpha = self.level[pairs] if alpha is None else np.broadcast_to(alpha, len(pairs))
        alphas = np.full(len(self.p), np.nan)
        alphas[pairs] = alpha
        ends = np.full((len(self.p), 2), np.nan)
        for block in blocks(self.samples, self.a, self.b, pairs):
            at = block.at
            found = paired_ends(block.sums, block.sizes, self.largest[at], alphas[at], self.p[at])
            ends[at] = np.stack(found, axis=1)
            if block.log:  # exact for the estimate, and (b, a) is minus (a, b)
                ends[at] = 2 * np.sqrt(block.of_a * block.of_b)[:, None] * np.sinh(ends[at] / 2)
        return np.clip(ends[pairs], -self.samples.span, self.samples.span)


def _ranks(beats: np.ndarray) -> np.ndarray:
    return np.stack([1 + beats.sum(axis=0), len(beats) - beats.sum(axis=1)], axis=1)


def compare_column(names: Sequence[str], samples: Samples, *, falling: bool = False) -> Column:
    """Tests every two methods over the samples that are ok in both; the test's adverse cluster is as large as the largest
    difference of any two in the column."""
    return _compare(names, samples, *np.triu_indices(len(names), 1), falling=falling, together=True)


def compare_pairs(
    names: Sequence[str], samples: Samples, a: np.ndarray, b: np.ndarray, *, falling: bool = False
) -> Column:
    """Tests pairs that are no column (methods and `full`), each by itself: its own largest difference is the size of the
    test's adverse cluster. a, b: positions in `names`, int [P]."""
    return _compare(names, samples, a, b, falling=falling, together=False)


def _compare(
    names: Sequence[str], samples: Samples, a: np.ndarray, b: np.ndarray, *, falling: bool, together: bool
) -> Column:
    count = len(a)
    n, clusters = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
    difference, p, largest = np.full(count, np.nan), np.ones(count), np.zeros(count)
    for block in blocks(samples, a, b, np.arange(count)):
        n[block.at], difference[block.at] = block.n, block.of_a - block.of_b
        clusters[block.at] = np.count_nonzero(block.sizes, axis=1)
        largest[block.at] = np.abs(block.sums).max(axis=1, initial=0.0)
    if together:
        largest[:] = largest.max(initial=0.0)
    for block in blocks(samples, a, b, np.flatnonzero(clusters >= LEAST)):
        p[block.at] = paired_p(block.sums, block.sizes, largest[block.at])
        binary = samples.binary[a[block.at]] & samples.binary[b[block.at]]
        exact = mcnemar_p((block.sums[binary] > 0).sum(axis=1), (block.sums[binary] < 0).sum(axis=1))
        p[block.at[binary]] = np.maximum(p[block.at[binary]], exact)
    return Column(tuple(names), samples, a, b, n, clusters, difference, p, largest, falling)


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


def mcnemar_p(only_a: np.ndarray, only_b: np.ndarray) -> np.ndarray:
    """Two-sided exact McNemar p-values: discordant samples fall to either side like fair coins; 1 without any."""
    from scipy.special import bdtr

    return np.minimum(1.0, 2 * bdtr(np.minimum(only_a, only_b), only_a + only_b, 0.5))

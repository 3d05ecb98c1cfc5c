"""One column of a table: methods at one budget by one metric, every two of them tested, and what may be said of them.

separated  two methods differ, by Holm's step-down correction (1979) over all pairs of the column
best       the methods of which no rival is proven better; the truly best one is among them. A method is out when a rival
           beats it at p <= alpha / (m - 1): each against its m - 1 rivals and without steps, as in Hsu's multiple
           comparisons with the best (Annals of Statistics 9, 1981); or in a separated pair
ranks      1 + the number of methods that beat it so, to m - the number that it beats so

Each holds in at least 95 % of columns; `make simulate` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmkv_bench.tables.influence import ClusterSums, cluster_sums
from mmkv_bench.tables.intervals import ALPHA, Aggregator
from mmkv_bench.tables.paired_test import LEAST, paired_ends, paired_p

_BLOCK = 1 << 20  # entries of pairs x clusters at a time
_ROUNDING = 1e-12  # of the largest sum: what is smaller is a difference of the order of addition


@dataclass(frozen=True)
class Samples:
    """What the methods of a column scored.

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
    def count(self) -> int:
        """How many clusters there are."""
        return int(self.index.max(initial=-1)) + 1

    @cached_property
    def ok(self) -> np.ndarray:
        """Which samples each method has, bool [m, n]."""
        known = ~np.isnan(self.scores)
        return known.all(axis=2) if known.ndim == 3 else known

    @cached_property
    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """(the distinct lines of `ok`, which of them is each method's, int [m])."""
        if self.ok.all():
            return self.ok[:1], np.zeros(len(self.ok), dtype=int)
        found, of = np.unique(self.ok, axis=0, return_inverse=True)
        return found, of.reshape(-1)

    @cached_property
    def span(self) -> float:
        """What no difference exceeds: 1 for means of shares."""
        known = self.scores[~np.isnan(self.scores)]
        bounded = self.share and self.aggregator is None and ((known >= 0) & (known <= 1)).all()
        return 1.0 if bounded else np.inf

    @cached_property
    def binary(self) -> np.ndarray:
        """Whether a method's scores are failures and successes of samples that are independent of each other, bool [m]."""
        if not self.share or self.aggregator is not None or self.count < len(self.index):
            return np.zeros(len(self.scores), dtype=bool)
        return (np.isnan(self.scores) | (self.scores == 0) | (self.scores == 1)).all(axis=1)


@dataclass(frozen=True)
class _Block:
    """Some of the pairs: which (`at` int [p]), their differences' sums and sizes over clusters [p, G] (sizes: or [1, G]),
    common samples, aggregates of a and of b over these [p]; log: the sums are of logarithms."""

    at: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray
    n: np.ndarray
    of_a: np.ndarray
    of_b: np.ndarray
    log: bool = False


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
        m = len(self.names)
        proven = self.separated | (self.p <= ALPHA / max(m - 1, 1))
        found = np.zeros((m, m), dtype=bool)
        found[self.a, self.b] = proven & self.a_better
        found[self.b, self.a] = proven & ~self.a_better
        return found

    @property
    def best(self) -> np.ndarray:
        """Methods of which no rival is proven better, bool [m]."""
        return ~self.beats.any(axis=0)

    @property
    def ranks(self) -> np.ndarray:
        """From and to, int [m, 2]."""
        return np.stack([1 + self.beats.sum(axis=0), len(self.names) - self.beats.sum(axis=1)], axis=1)

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
        for block in _blocks(self.samples, self.a, self.b, pairs):
            at = block.at
            found = paired_ends(block.sums, block.sizes, self.largest[at], alphas[at], self.p[at])
            ends[at] = np.stack(found, axis=1)
            if block.log:  # exact for the estimate, and (b, a) is minus (a, b)
                ends[at] = 2 * np.sqrt(block.of_a * block.of_b)[:, None] * np.sinh(ends[at] / 2)
        return np.clip(ends[pairs], -self.samples.span, self.samples.span)


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
    for block in _blocks(samples, a, b, np.arange(count)):
        n[block.at], difference[block.at] = block.n, block.of_a - block.of_b
        clusters[block.at] = np.count_nonzero(block.sizes, axis=1)
        largest[block.at] = np.abs(block.sums).max(axis=1, initial=0.0)
    if together:
        largest[:] = largest.max(initial=0.0)
    for block in _blocks(samples, a, b, np.flatnonzero(clusters >= LEAST)):
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


def _blocks(samples: Samples, a: np.ndarray, b: np.ndarray, pairs: np.ndarray) -> Iterator[_Block]:
    """The pairs in blocks of bounded size; those without a common sample are left out."""
    waiting: list[_Block] = []
    rows = 0
    for block in _pieces(samples, a, b, pairs):
        waiting.append(block)
        rows += len(block.at)
        if rows * samples.count >= _BLOCK:
            yield _joined(waiting)
            waiting, rows = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(blocks: Sequence[_Block]) -> _Block:
    if len(blocks) == 1:
        return blocks[0]

    def rows(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(arrays))

    return _Block(
        rows(block.at for block in blocks),
        rows(block.sums for block in blocks),
        rows(np.broadcast_to(block.sizes, block.sums.shape) for block in blocks),
        rows(block.n for block in blocks),
        rows(block.of_a for block in blocks),
        rows(block.of_b for block in blocks),
        blocks[0].log,
    )


def _pieces(samples: Samples, a: np.ndarray, b: np.ndarray, pairs: np.ndarray) -> Iterator[_Block]:
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
            yield _Block(own[cut], sums, found.sizes[None], n, *values, found.log)


def _cluster_sums(samples: Samples, members: np.ndarray, common: np.ndarray) -> ClusterSums:
    """Sums over all clusters of the column, 0 in those that hold none of the common samples."""
    held, index = np.unique(samples.index[common], return_inverse=True)
    found = cluster_sums(samples.scores[members][:, common], index.reshape(-1), len(held), samples.aggregator)
    if len(held) == samples.count:
        return found
    sums, sizes = np.zeros((len(members), samples.count)), np.zeros(samples.count)
    sums[:, held], sizes[held] = found.sums, found.sizes
    return ClusterSums(found.values, sums, sizes, found.log)

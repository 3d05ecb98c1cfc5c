"""Paired comparison of two cells over the samples that are ok in both, and Holm's correction over a table.

For zeros and ones with one sample per cluster: the interval of the difference is Tango's (Statistics in Medicine 17,
1998), which inverts McNemar's score test, and the p-value is the larger of that test's and the exact (binomial)
McNemar test's, so that neither a few discordant samples nor a long tail can claim too much. Everything else (clusters
of several samples, seed averages, graded scores, aggregates that are no mean): percentile bootstrap over clusters with
the dataset's draws; its p-value is at least 2^(1-k), k = clusters on which the two cells differ, the least that any
test by flipping the signs of k differences can reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmkv_bench.tables.intervals import (
    ALPHA,
    Aggregator,
    bootstrap_statistics,
    cluster_index,
    is_binary,
    normal_quantile,
    percentile_ends,
    percentile_p,
)


@dataclass(frozen=True)
class Difference:
    """Score of `a` minus score of `b` over `n` common samples; `discordant` (only a right, only b right) or `draws`."""

    n: int
    value: float
    p: float
    kind: str  # mcnemar | bootstrap | none
    discordant: tuple[int, int] | None = None
    draws: np.ndarray | None = field(default=None, repr=False, compare=False)

    def interval(self, alpha: float = ALPHA) -> tuple[float, float] | tuple[None, None]:
        """Interval at level 1 - alpha; (None, None) when there is nothing to draw from."""
        if self.discordant is not None:
            only_a, only_b = self.discordant
            # The upper end by symmetry, so that (b, a) is exactly minus (a, b).
            return tango_low(only_a, only_b, self.n, alpha), -tango_low(only_b, only_a, self.n, alpha)
        if self.draws is not None:
            return percentile_ends(self.draws, alpha)
        return None, None


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar p-value: discordant samples fall to either side like fair coins; 1 without any."""
    n = only_a + only_b
    ways, term = 0, 1
    for k in range(min(only_a, only_b) + 1):
        ways += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * ways / 2**n)


def mcnemar_score(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's score test without continuity correction; 1 when nothing is discordant."""
    n = only_a + only_b
    return 1.0 if n == 0 else math.erfc(abs(only_a - only_b) / math.sqrt(2 * n))


def tango_low(only_a: int, only_b: int, n: int, alpha: float = ALPHA) -> float:
    """Lower end of Tango's score interval of (only_a - only_b) / n among n paired zeros and ones."""
    z = normal_quantile(1 - alpha)
    low, high = -1.0, (only_a - only_b) / n
    for _ in range(80):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _tango_statistic(only_a, only_b, n, middle) > z:
            low = middle
        else:
            high = middle
    return low


def _tango_statistic(only_a: int, only_b: int, n: int, delta: float) -> float:
    """Score statistic of the hypothesis that the difference is `delta`; it falls as delta grows."""
    # Maximum-likelihood probability of "only b" under the hypothesis: the larger root of a quadratic.
    linear = -only_a - only_b + (2 * n - only_a + only_b) * delta
    root = math.sqrt(max(0.0, linear**2 + 8 * n * only_b * delta * (1 - delta)))
    p_only_b = max(0.0, -delta, (root - linear) / (4 * n))
    variance = n * max(0.0, 2 * p_only_b + delta * (1 - delta))
    excess = only_a - only_b - n * delta
    return excess / math.sqrt(variance) if variance > 0 else (math.copysign(math.inf, excess) if excess else 0.0)


def paired(
    a: np.ndarray,
    b: np.ndarray,
    clusters: np.ndarray,
    dataset: str,
    aggregator: Aggregator | None = None,
    share: bool = True,
) -> Difference | None:
    """Difference a - b of two score vectors [n] over the same samples, NaN = not ok; None when none is ok in both.

    For a `Pooled` aggregator they are the samples' parts [n, k], a row of NaN = not ok. Seeds must have been averaged
    within a sample before. share False: scores are amounts (`known.is_share`), never successes and failures.
    """
    both = ~np.isnan(a + b).reshape(len(a), -1).any(axis=1)
    a, b, clusters = a[both], b[both], np.asarray(clusters)[both]
    n = len(a)
    if n == 0:
        return None
    index, count = cluster_index(clusters)
    if share and aggregator is None and count == n and is_binary(a) and is_binary(b):
        only_a, only_b = int(np.sum(a > b)), int(np.sum(b > a))
        p = max(mcnemar_exact(only_a, only_b), mcnemar_score(only_a, only_b))
        return Difference(n, (only_a - only_b) / n, p, "mcnemar", discordant=(only_a, only_b))
    value = float(np.mean(a - b)) if aggregator is None else float(aggregator(a) - aggregator(b))
    if count < 2:
        return Difference(n, value, 1.0, "none")
    if aggregator is None:
        draws = bootstrap_statistics(a - b, clusters, dataset)
    else:
        draws = bootstrap_statistics(a, clusters, dataset, aggregator)
        draws = draws - bootstrap_statistics(b, clusters, dataset, aggregator)
    differing = len(np.unique(index[(a != b).reshape(n, -1).any(axis=1)]))
    p = min(1.0, max(percentile_p(draws), 2.0 ** (1 - differing)))
    return Difference(n, value, p, "bootstrap", draws=draws)


@dataclass(frozen=True)
class HolmStep:
    """What Holm's procedure (1979) says of one hypothesis: its level, its adjusted p-value, whether it is rejected."""

    level: float
    adjusted: float
    rejected: bool


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[HolmStep]:
    """Holm's step-down correction, in the order given.

    The k-th smallest of m p-values is held against alpha / (m - k + 1); the first that fails ends the procedure, and
    the remaining hypotheses keep that step's level, so that an interval at `level` never contradicts `rejected`.
    """
    m = len(p_values)
    steps: list[HolmStep | None] = [None] * m
    adjusted, stopped_at = 0.0, None
    for rank, position in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        p = p_values[position]
        adjusted = max(adjusted, min(1.0, (m - rank) * p))
        level = alpha / (m - rank) if stopped_at is None else stopped_at
        if stopped_at is None and p > level:
            stopped_at = level
        steps[position] = HolmStep(level, adjusted, stopped_at is None)
    return steps


@dataclass(frozen=True)
class Pair:
    """Two cells of a table at one budget and their Holm-corrected difference a - b (`low`, `high` at Holm's level).

    falling: the smaller value is the better one.
    """

    budget: str
    a: str
    b: str
    difference: Difference
    low: float | None
    high: float | None
    step: HolmStep
    falling: bool = False

    @property
    def separated(self) -> bool:
        """Whether the Holm-corrected paired interval excludes 0 (and its test rejects)."""
        return self.step.rejected and self.low is not None and (self.low > 0 or self.high < 0)

    @property
    def better(self) -> str | None:
        a_is_better = (self.difference.value > 0) != self.falling
        return (self.a if a_is_better else self.b) if self.separated else None

    @property
    def worse(self) -> str | None:
        return (self.b if self.better == self.a else self.a) if self.separated else None


def correct(
    differences: Sequence[tuple[str, str, str, Difference]], alpha: float = ALPHA, falling: bool = False
) -> list[Pair]:
    """All comparisons of one table, as (budget, a, b, difference), corrected together; falling: less is better."""
    steps = holm([difference.p for *_, difference in differences], alpha)
    return [
        Pair(budget, a, b, difference, *difference.interval(step.level), step, falling)
        for (budget, a, b, difference), step in zip(differences, steps, strict=True)
    ]


def separated_pairs(pairs: Sequence[Pair], without: Sequence[str] = ()) -> dict[str, list[tuple[str, str]]]:
    """Per budget, the (better, worse) pairs that the table separates; pairs with a name in `without` are left out."""
    found: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        rows = found.setdefault(pair.budget, [])
        if pair.separated and not {pair.a, pair.b} & set(without):
            rows.append((pair.better, pair.worse))
    return found

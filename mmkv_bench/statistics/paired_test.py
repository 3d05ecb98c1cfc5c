"""One paired test for every table: is the difference of two methods 0, given its sums over clusters of samples?

Arrays: `sums` float64 [P, G], the difference summed within each of G clusters for each of P pairs; `sizes` [P, G] or [1, G],
what it is divided by (how many samples; tokens for perplexity), 0 where a pair has nothing in the cluster. The estimate is
sum sums / sum sizes. Clusters (an image, a document, a video, a page) are the independent units.

The p-value is the larger of two: Student's t of the estimate with its cluster-robust variance, and the sign flip of the
clusters' sums. Each alone, and both together, separate equal methods where differences are skewed: a method that loses
a little often and wins much rarely shows no win in a small data set. So both are taken after one adverse cluster is added,
against the sign of the difference and as large as the largest |sum| that any pair of the column shows (`largest`): no
claim rests on a column's rarest event being absent from one of its pairs. What that cluster turns has p = 1. With fewer
than `LEAST` clusters nothing is claimed.

Intervals invert the test: at level 1 - alpha they hold every difference that it does not reject at alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmkv_bench.statistics.sign_flip import flip_p

LEAST = 10  # clusters, below which nothing is claimed
_DOUBLINGS = 60  # or steps outwards
_HALVINGS = 60
_STEPS = 60
_CLOSE = 1e-7  # of a quantile


@dataclass(frozen=True)
class _Moments:
    """What the t test needs of each pair, float64 [P]: sums over clusters of the difference, of its products with the
    sizes, of the sizes; their number."""

    total: np.ndarray
    square: np.ndarray
    product: np.ndarray
    size: np.ndarray
    size_square: np.ndarray
    clusters: np.ndarray

    @classmethod
    def of(cls, sums: np.ndarray, sizes: np.ndarray) -> _Moments:
        wide = np.broadcast_to(sizes, sums.shape)
        each = np.ones(len(sums))
        return cls(
            sums.sum(axis=1),
            np.einsum("pg,pg->p", sums, sums),
            np.einsum("pg,pg->p", sums, wide),
            sizes.sum(axis=1) * each,
            np.einsum("pg,pg->p", sizes, sizes) * each,
            np.count_nonzero(sizes, axis=1) * each,
        )

    def shifted(self, shift: np.ndarray) -> _Moments:
        """The same of sums - shift * sizes."""
        return replace(
            self,
            total=self.total - shift * self.size,
            square=self.square - 2 * shift * self.product + shift**2 * self.size_square,
            product=self.product - shift * self.size_square,
        )


def paired_p(sums: np.ndarray, sizes: np.ndarray, largest: np.ndarray | float) -> np.ndarray:
    """Two-sided p-values [P] of no difference. largest: size of the adverse cluster, one number or [P]."""
    moments = _Moments.of(sums, sizes)
    largest = np.broadcast_to(np.asarray(largest, np.float64), len(sums))
    p = _t_p(moments, largest)
    tested = p < 1
    p[tested] = np.maximum(p[tested], _flip_p(sums[tested], moments.total[tested], largest[tested]))
    return np.where(moments.clusters >= LEAST, p, 1.0)


def _t_p(moments: _Moments, largest: np.ndarray) -> np.ndarray:
    """p-values [P] of the t statistic with the adverse cluster, of the mean size; 1 where that turns the sign."""
    from scipy.special import stdtr

    clusters = np.maximum(moments.clusters, 2)
    average = moments.size / clusters
    left = np.abs(moments.total) - largest
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = left / (moments.size + average)
        product = np.sign(moments.total) * moments.product - largest * average
        residuals = moments.square + largest**2 - 2 * mean * product + mean**2 * (moments.size_square + average**2)
        error = np.sqrt(np.maximum(residuals, 0.0) * (clusters + 1) / clusters) / (moments.size + average)
        statistic = np.where(left > 0, mean / error, 0.0)
    return np.where(left > 0, 2 * stdtr(clusters - 1, -statistic), 1.0)


def _flip_p(sums: np.ndarray, total: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """p-values [P] of the sign flip with the adverse cluster, never below 2^(1-k), k = differing clusters."""
    terms = np.concatenate([sums, (-np.sign(total) * largest)[:, None]], axis=1)
    differing = np.count_nonzero(sums, axis=1)
    return np.maximum(flip_p(terms), 2.0 ** (1.0 - np.minimum(np.maximum(differing, 1), 1000)))


def paired_ends(
    sums: np.ndarray, sizes: np.ndarray, largest: np.ndarray | float, alpha: np.ndarray | float, p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ends [P] of the intervals at level 1 - alpha; NaN with fewer than `LEAST` clusters, infinite where no difference,
    however large, would be rejected.

    alpha: one number or [P]. p: what `paired_p` gives, by which 0 is in or out.
    """
    low, high = np.full((2, len(sums)), np.nan)
    claimed = np.flatnonzero(np.broadcast_to(np.count_nonzero(sizes, axis=1) >= LEAST, len(sums)))
    if not len(claimed):
        return low, high
    given = [np.broadcast_to(np.asarray(each, np.float64), len(sums))[claimed] for each in (largest, alpha, p)]
    lines = [sums[claimed], *(() if len(sizes) == 1 else (sizes[claimed],)), *(each[:, None] for each in given)]
    first, of = _distinct(lines)
    one = claimed[first]
    sums, sizes = sums[one], sizes if len(sizes) == 1 else sizes[one]
    adverse, level, own_p = (each[first] for each in given)
    low[claimed] = _low(sums, sizes, adverse, level, own_p)[of]
    high[claimed] = -_low(-sums, sizes, adverse, level, own_p)[of]
    return low, high


def _distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(first positions of the distinct lines of float64 arrays [P, any], which of them each line is): methods that keep the
    same entries answer alike, and many cells score alike in a small group of samples."""
    lines = np.ascontiguousarray(np.concatenate(columns, axis=1))
    keys = lines.view(np.dtype((np.void, lines.shape[1] * lines.itemsize))).reshape(-1)
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    return first, of.reshape(-1)


def _low(sums: np.ndarray, sizes: np.ndarray, largest: np.ndarray, alpha: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Lower ends [P]: the lower of the two tests' ends, for both p-values fall on the way down."""
    moments = _Moments.of(sums, sizes)
    inside = (moments.total - largest) / moments.size  # where the adverse cluster turns the sign: p = 1
    low = _t_end(moments, largest, alpha, inside)
    finite = np.flatnonzero(np.isfinite(low))
    own = sizes if len(sizes) == 1 else sizes[finite]
    low[finite] = _flip_end(sums[finite], own, largest[finite], alpha[finite], inside[finite], low[finite])
    # Of 0 the test itself decides: there equal samples are ties, whose sums are no longer 0 beside it.
    above = moments.total > 0
    return np.where(
        above & (p <= alpha), np.maximum(low, np.finfo(float).tiny), np.where(above, np.minimum(low, 0), low)
    )


def _t_end(moments: _Moments, largest: np.ndarray, alpha: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Differences [P] below `inside` at which the t test's p-value is alpha; -inf where it is larger all the way."""
    width = np.maximum(np.maximum(largest / moments.size, np.abs(inside)), np.finfo(float).tiny)
    low, high, kept = inside - width, inside, np.zeros(len(inside), dtype=bool)
    for _ in range(_DOUBLINGS):
        kept = _t_p(moments.shifted(low), largest) > alpha
        if not kept.any():
            break
        width = np.where(kept, 2 * width, width)
        low, high = np.where(kept, low - width, low), np.where(kept, low, high)
    else:
        low = np.where(kept, -np.inf, low)
    for _ in range(_HALVINGS):
        with np.errstate(invalid="ignore"):
            middle = (low + high) / 2
            kept = _t_p(moments.shifted(middle), largest) > alpha
        low, high = np.where(kept, low, middle), np.where(kept, middle, high)
    return low


def _flip_end(
    sums: np.ndarray, sizes: np.ndarray, largest: np.ndarray, alpha: np.ndarray, inside: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """Differences [P], `start` or below it, at which the sign flip's p-value is at most alpha, by false position on the
    scale of normal quantiles; -inf where it is larger all the way."""

    wanted = np.sqrt(-2 * np.log(alpha))

    def excess(which: np.ndarray, at: np.ndarray) -> np.ndarray:
        shifted = sums[which] - at[:, None] * (sizes if len(sizes) == 1 else sizes[which])
        p = _flip_p(shifted, shifted.sum(axis=1), largest[which])
        return np.sqrt(-2 * np.log(p)) - wanted[which]

    low, high = start.copy(), inside.copy()
    at_low, at_high = excess(np.arange(len(low)), low), -wanted
    out = np.flatnonzero(at_low < 0)
    for _ in range(_DOUBLINGS):
        high[out], at_high[out] = low[out], at_low[out]
        # The quantile is nearly a line; a little further, so that the end soon lies between.
        reached = np.maximum(wanted[out] + at_low[out], wanted[out] / 4)
        low[out] = inside[out] - (inside[out] - low[out]) * (1.05 * wanted[out] / reached)
        at_low[out] = excess(out, low[out])
        out = out[at_low[out] < 0]
        if not len(out):
            break
    low[out] = -np.inf
    open_ = np.flatnonzero(np.isfinite(low) & (low < start))
    for _ in range(_STEPS):
        open_ = open_[(at_low[open_] > _CLOSE) & (high[open_] - low[open_] > 1e-12 * np.abs(low[open_]))]
        if not len(open_):
            break
        share = at_low[open_] / (at_low[open_] - at_high[open_])
        middle = low[open_] + share * (high[open_] - low[open_])
        found = excess(open_, middle)
        rejected = found >= 0
        # Illinois: the end that stays counts half, so that both move.
        at_high[open_[rejected]] /= 2
        at_low[open_[~rejected]] /= 2
        low[open_[rejected]], at_low[open_[rejected]] = middle[rejected], found[rejected]
        high[open_[~rejected]], at_high[open_[~rejected]] = middle[~rejected], found[~rejected]
    return low

"""How often sums reach what was seen, or more to either side, when each term's sign is a fair coin.

Up to `ENUMERATED` terms that are not 0 the share of all sign patterns is counted; beyond that it is the saddlepoint tail of
Lugannani and Rice (Advances in Applied Probability 12, 1980), the distribution being known exactly by its cumulant
generating function, sum log cosh(s |a_c|).
"""

from __future__ import annotations

import numpy as np

ENUMERATED = 17  # 16 clusters and the adverse one of `paired_test`
_BLOCK = 1 << 20  # sums at a time
_TIE = 1e-9  # of the sum of the terms: rounding must not tell equal sums apart


def flip_p(terms: np.ndarray) -> np.ndarray:
    """Two-sided p-values [P] of the sums of terms float64 [P, G]; 1 where the sum is 0, never below 2^(1-k), k = terms
    that are not 0."""
    sizes = np.abs(terms)
    totals = np.abs(terms.sum(axis=1))
    differing = np.count_nonzero(sizes, axis=1)
    p = np.ones(len(terms))
    few = differing <= ENUMERATED
    p[few] = _enumerated(sizes[few], totals[few])
    tail = ~few & (totals > 0)
    p[tail] = _saddlepoint(sizes[tail], totals[tail])
    return np.clip(p, 2.0 ** (1.0 - np.minimum(np.maximum(differing, 1), 1000)), 1.0)


def _signs(n: int) -> np.ndarray:
    """All patterns of n signs, float64 [n, 2^n]."""
    return 1.0 - 2.0 * ((np.arange(2**n) >> np.arange(n)[:, None]) & 1)


def _enumerated(sizes: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Share of all sign patterns of the largest `ENUMERATED` terms; terms of 0 double both counts."""
    width = min(ENUMERATED, sizes.shape[1])
    largest = np.partition(sizes, sizes.shape[1] - width, axis=1)[:, sizes.shape[1] - width :]
    half = width // 2
    first, second = _signs(half), _signs(width - half)
    p = np.empty(len(sizes))
    step = max(1, _BLOCK // second.shape[1])
    for start in range(0, len(sizes), step):
        own = slice(start, start + step)
        reached = totals[own] - _TIE * sizes[own].sum(axis=1)
        # Not by a matrix product: a pair's sums must not depend on how many pairs are taken at once.
        ordered = np.sort(np.einsum("ph,hk->pk", largest[own, half:], second), axis=1)
        wanted = reached[:, None] - np.einsum("ph,hk->pk", largest[own, :half], first)
        below = np.concatenate([row.searchsorted(needed) for row, needed in zip(ordered, wanted, strict=True)])
        p[own] = 2 * (1 - below.reshape(wanted.shape).sum(axis=1) / 2.0**width)
    return np.where(totals > 0, np.minimum(p, 1.0), 1.0)


def _saddlepoint(sizes: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Lugannani and Rice's two-sided tail [P] for totals > 0."""
    from scipy.special import ndtr

    sums = sizes.sum(axis=1)
    p = np.zeros(len(sizes))  # all terms of one sign: the floor of the caller
    inner = np.flatnonzero(totals < sums * (1 - 1e-12))
    sizes, totals = sizes[inner], totals[inner]
    point, variance = _solve(sizes, totals)
    x = point[:, None] * sizes
    cumulants = (x + np.log1p(np.exp(-2 * x))).sum(axis=1) - np.log(2) * sizes.shape[1]
    w = np.sqrt(np.maximum(2 * (point * totals - cumulants), 0.0))
    u = point * np.sqrt(variance)
    central = w < 1e-3  # the correction goes to 0, and its two terms to infinity
    with np.errstate(divide="ignore", invalid="ignore"):
        correction = np.exp(-(w**2) / 2) / np.sqrt(2 * np.pi) * (1 / u - 1 / w)
    p[inner] = 2 * (ndtr(-w) + np.where(central, 0.0, correction))
    return p


def _solve(sizes: np.ndarray, totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s [P] at which the tilted sum has the mean `totals`, the tilted variance [P]).

    The mean, sum a tanh(s a), is concave in s > 0 and below `totals` at s = totals / sum a^2, so Newton's method rises to
    the solution and never steps over it.
    """
    squares = sizes**2
    point = totals / squares.sum(axis=1)
    variance = np.empty(len(sizes))
    open_ = np.arange(len(sizes))
    for _ in range(200):
        own, s = sizes[open_], point[open_]
        slope = np.tanh(s[:, None] * own)
        missing = totals[open_] - np.einsum("pg,pg->p", own, slope)
        spread = np.einsum("pg,pg->p", squares[open_], 1 - slope**2)
        variance[open_] = spread
        step = np.divide(missing, spread, out=np.zeros_like(missing), where=spread > 0)
        moving = step > 1e-9 * s
        point[open_[moving]] += step[moving]
        open_ = open_[moving]
        if not len(open_):
            break
    return point, variance

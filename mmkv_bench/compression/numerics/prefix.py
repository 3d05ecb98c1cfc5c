"""PrefixKV's global prefix configuration: cumulative importance per layer, and the threshold that meets a budget.

Notation of the paper (arXiv 2412.03409, section 3.2 and 3.3): n tokens, L layers, ``P_l`` the cumulative priority of
layer l (importance normalised to sum 1, sorted descending, summed up), ``R_l(p)`` the smallest fraction of tokens whose
cumulative priority reaches p, rho the fraction of the cache that is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.exact import exact_decimal

HALVINGS = 64  # of the interval [0, 1]: the two ends are then one float64 unless p is below 2^-11


def prefix_curves(importance: Sequence[Tensor]) -> Tensor:
    """Return ``P_l``, the cumulative priority of every layer: float64 ``[L, n]`` on the CPU, rising to exactly 1.

    importance: per layer ``[n]``, 0 or more. The tokens of a layer without any importance count as equally important.
    """
    rows = torch.stack([row.double().cpu() for row in importance])
    total = rows.sum(-1, keepdim=True)
    rows = torch.where(total > 0, rows / total.masked_fill(total == 0, 1), 1 / max(1, rows.shape[1]))
    curves = rows.sort(dim=-1, descending=True, stable=True).values.cumsum(-1)
    # The last sum may miss 1 by rounding; `R_l(1)` is the number of tokens that have any importance.
    return curves / curves[:, -1:]


def prefix_counts(curves: Tensor, p: float) -> Tensor:
    """Return ``n * R_l(p)``, int64 ``[L]``: the length of each layer's shortest prefix of priority p or more.

    curves: ``P_l`` of ``prefix_curves``.
    """
    return torch.searchsorted(curves, torch.full((len(curves), 1), p, dtype=curves.dtype)).squeeze(1) + 1


def search(curves: Tensor, total: Fraction, delta: float = 0.0, steps: int = 0) -> tuple[list[int], int]:
    """Run algorithm 1: halve the interval [0, 1] of p until the prefixes of all layers have ``total`` entries.

    Args:
        curves: ``P_l``, ``[L, n]``.
        total: ``L * rho * n`` entries.
        delta: ``|sum R_l - L * rho|`` at which the search may stop, in whole layers (the unit of the paper's table 10).
            0 demands the exact total, which may not exist: then the search ends when p has no more digits.
        steps: more than 0: this many halvings instead of delta (the paper's table 11); an exact total ends it early.

    Returns:
        ``n * R_l`` at the last p, before any scaling, and the number of halvings.
    """
    n = curves.shape[1]
    tolerance = 0 if steps else exact_decimal(delta) * n
    low, high, steps_used = 0.0, 1.0, 0
    while True:
        p, steps_used = (low + high) / 2, steps_used + 1
        counts = prefix_counts(curves, p)
        excess = int(counts.sum()) - total
        if abs(excess) <= tolerance or steps_used == (steps or HALVINGS):
            return counts.tolist(), steps_used
        low, high = (p, high) if excess < 0 else (low, p)


def scale_to(
    weights: Sequence[Fraction], total: Fraction, most: Fraction = Fraction(1), least: Fraction = Fraction(0)
) -> list[Fraction]:
    """Return the weights times one common factor, clipped to [least, most], so that they add up to ``total``, exactly.

    Args:
        weights: non-negative; weights of 0 share the rest evenly if all others are clipped.

    Raises:
        ValueError: ``total`` is less than ``least`` or more than ``most`` for every weight.
    """
    if not least * len(weights) <= total <= most * len(weights):
        raise ValueError(f"{len(weights)} shares between {least} and {most} cannot add up to {total}")
    if not any(weights):
        return [Fraction(total) / len(weights)] * len(weights)

    def clipped(factor: Fraction) -> list[Fraction]:
        return [min(max(weight * factor, least), most) for weight in weights]

    positive = [weight for weight in weights if weight > 0]
    # Between two of these factors the sum is a straight line; the factor lies on one of them.
    corners = sorted({Fraction(bound) / weight for weight in positive for bound in (least, most)})
    upper_index = bisect_left(corners, total, key=lambda factor: sum(clipped(factor), Fraction(0)))
    if upper_index == len(corners):  # all layers with a weight are full: the others share the rest
        fixed = most * len(positive)
        return [most if weight else (total - fixed) / (len(weights) - len(positive)) for weight in weights]
    if upper_index == 0:
        return clipped(corners[0])
    low, high = corners[upper_index - 1], corners[upper_index]
    start, end = sum(clipped(low)), sum(clipped(high))
    return clipped(low + (high - low) * (total - start) / (end - start))


def prefix_ratios(curves: Tensor, rho: float, delta: float = 0.0, steps: int = 0) -> tuple[list[float], int]:
    """Return the kept fraction ``R_l`` of every layer for one prompt, and the number of halvings.

    ``R_l`` is in (0, 1], scaled so that the sum is ``L * rho`` apart from float rounding.

    Args:
        curves: ``P_l`` of ``prefix_curves``, ``[L, n]``.
        rho: fraction kept, in (0, 1].
        delta, steps: see ``search``.
    """
    layers, n = curves.shape
    total = layers * exact_decimal(rho)
    counts, used = search(curves, total * n, delta, steps)
    return [float(share) for share in scale_to([Fraction(count, n) for count in counts], total)], used


def interpolate_ratios(grid: Sequence[float], ratios: Sequence[Sequence[float]], rho: Fraction) -> list[Fraction]:
    """Return ``R_l`` of every layer, interpolated linearly at rho between the two nearest budgets of a profile.

    The profile is extended by 0 at rho = 0 and 1 at rho = 1. grid: its budgets, ascending in (0, 1]. ratios: for each
    budget one ``R_l`` per layer.
    """
    layers = len(ratios[0])
    points = [
        (Fraction(0), [0.0] * layers),
        *zip(map(exact_decimal, grid), ratios, strict=True),
        (Fraction(1), [1.0] * layers),
    ]
    upper_index = next(i for i, (at, _) in enumerate(points) if at >= rho)
    (left, low), (right, high) = points[max(upper_index - 1, 0)], points[upper_index]
    share = (rho - left) / (right - left) if right > left else Fraction(0)
    return [exact_decimal(a) + (exact_decimal(b) - exact_decimal(a)) * share for a, b in zip(low, high, strict=True)]

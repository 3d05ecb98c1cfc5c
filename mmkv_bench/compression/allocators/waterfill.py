"""Division of entries by weights: proportional shares clipped at a cap, and rounding that keeps the total."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite


def water_fill(weights: Sequence[float | Fraction], total: int, cap: int | Sequence[int]) -> list[int]:
    """Divide ``total`` entries exactly in proportion to ``weights``, no item above its cap.

    The real shares are ``min(cap_i, level * weight_i)``, where ``level`` makes their sum ``total``: items below their
    cap divide the excess of the others in proportion to their weights. Items of weight 0 get nothing unless all others
    are full; then they divide the rest equally, up to their caps. Shares are rounded by largest remainder (equal
    remainders: lower index first). All arithmetic is exact: floats become the fractions that they represent.

    Args:
        weights: finite, 0 or more, one per item (layer, head).
        total: entries to divide, 0 or more.
        cap: the most that an item can take [entries], one number for all or one per item.

    Returns:
        One count per item, ``0 <= count <= cap``; the counts add up to ``total``.

    Raises:
        ValueError: negative or non-finite weights, another number of caps than weights, a cap below 0, a total below 0
            or above the sum of the caps.
    """
    caps = [cap] * len(weights) if isinstance(cap, int) else list(cap)
    if len(caps) != len(weights) or any(most < 0 for most in caps):
        raise ValueError(f"{len(caps)} caps {caps} for {len(weights)} weights; allowed: one cap of 0 or more for each")
    if any(not isfinite(weight) or weight < 0 for weight in weights):
        raise ValueError(f"the weights are {list(weights)}; allowed: finite numbers of 0 or more")
    if not 0 <= total <= sum(caps):
        raise ValueError(f"{total} entries cannot be divided; allowed: 0 to {sum(caps)}, the sum of the caps")
    exact = [Fraction(weight) for weight in weights]
    shares = [Fraction(0)] * len(exact)
    unfilled, remaining = [i for i, weight in enumerate(exact) if weight > 0], Fraction(total)
    if not unfilled or sum(caps[i] for i in unfilled) < total:
        for i in unfilled:
            shares[i] = Fraction(caps[i])
        remaining -= sum(shares)
        exact, unfilled = [Fraction(1)] * len(exact), [i for i, weight in enumerate(exact) if weight == 0]
    while unfilled:
        level = remaining / sum(exact[i] for i in unfilled)
        full_heads = [i for i in unfilled if level * exact[i] >= caps[i]]
        for i in full_heads or unfilled:
            shares[i] = Fraction(caps[i]) if full_heads else level * exact[i]
        if not full_heads:
            break
        remaining -= sum(caps[i] for i in full_heads)
        unfilled = [i for i in unfilled if i not in set(full_heads)]
    return largest_remainder(shares)


def largest_remainder(shares: Sequence[Fraction]) -> list[int]:
    """Round ``shares`` to whole numbers with the same sum, each less than 1 from its share.

    Every share is rounded down. The largest remainders get one of the missing entries each (equal remainders: lower
    index first).

    Args:
        shares: exact fractions, 0 or more, with a whole sum.

    Raises:
        ValueError: the sum is not whole.
    """
    total = sum(shares, Fraction(0))
    if total.denominator != 1:
        raise ValueError(f"the shares add up to {total}, which is not a whole number of entries")
    floors = [share.numerator // share.denominator for share in shares]
    missing = int(total) - sum(floors)
    rounded_up = sorted(range(len(shares)), key=lambda i: (floors[i] - shares[i], i))[:missing]
    return [count + (i in rounded_up) for i, count in enumerate(floors)]

"""Real shares of a budget -> whole entries with exactly the same sum."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def largest_remainder(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers that differ from ``shares`` by less than 1 and add up to the same sum.

    Every share is rounded down; what is missing goes, one each, to the largest remainders (equal remainders: lower
    index first). Shares are exact fractions, so no result depends on floating-point rounding.

    Args:
        shares: non-negative, with a whole sum.

    Raises:
        ValueError: the sum is not whole: no rounding keeps it.
    """
    total = sum(shares, Fraction(0))
    if total.denominator != 1:
        raise ValueError(f"the shares add up to {total}, which is not a whole number of entries")
    down = [share.numerator // share.denominator for share in shares]
    missing = int(total) - sum(down)
    first = sorted(range(len(shares)), key=lambda i: (down[i] - shares[i], i))[:missing]
    return [count + (i in first) for i, count in enumerate(down)]

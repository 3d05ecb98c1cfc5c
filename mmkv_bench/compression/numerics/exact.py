"""Exact fractions of numbers that users wrote as decimals."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction


def exact_decimal(value: float) -> Fraction:
    """Return the decimal number as the user wrote it, not its nearest float: 0.05 of 60 is exactly 3."""
    return Fraction(Decimal(str(value)))

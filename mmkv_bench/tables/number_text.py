"""Numbers as tables print them."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

_UNITS = {"seconds": ((1.0, "s"), (1e-3, "ms")), "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))}


def score(value: float | None) -> str:
    """Two decimals, without a minus on zero; "-" for nothing."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(value: float) -> str:
    """Two decimals with a sign, but for zero."""
    return score(value) if float(f"{value:.2f}") <= 0 else f"+{score(value)}"


def span(low: float | None, high: float | None) -> str:
    """`[0.71, 0.80]`, or "" without an interval."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def p_value(p: float) -> str:
    """Three decimals, or that it is smaller."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def number(value: float | None) -> str:
    """Three significant digits, never in powers of ten; whole numbers as they are; "-" for nothing."""
    if value is None:
        return "-"
    if value == 0 or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"


def number_span(low: float | None, high: float | None, size: float = 1.0) -> str:
    """`[0.71, 0.8]` in units of `size`; "" without an interval, and where nothing varies."""
    return "" if low is None or high is None or low == high else f"[{number(low / size)}, {number(high / size)}]"


def unit_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Size and name of the largest unit (s or ms; GiB to B) in which the largest value is one at least.

    unit: as the rows have it; any but seconds and bytes stays.
    """
    sizes = _UNITS.get(unit)
    if sizes is None:
        return 1.0, unit
    most = max(values, default=0.0)
    return next((size for size in sizes if most >= size[0]), sizes[-1])

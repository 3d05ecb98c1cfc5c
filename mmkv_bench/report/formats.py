"""Numbers as pages show them, and as their scripts hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def number(value: Any) -> float | int | None:
    """A number with six digits, whole ones as they are; None for null, NaN and infinities."""
    if value is None or isinstance(value, bool | int):
        return value
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


def numbers(values: Iterable[Any]) -> list[float | int | None]:
    """`number` of each."""
    return [number(value) for value in values]


def score(value: float | None) -> str:
    """A score as pages show it; `-` for none."""
    return "-" if value is None else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def interval(low: float | None, high: float | None) -> str:
    """`[0.710, 0.800]`, "" for none."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def budget_words(axis: str, budget: str) -> str:
    """`64 entries`, `20 %`, "" for none."""
    if not budget:
        return ""
    return f"{float(budget) * 100:.4g} %" if axis == "fraction" else f"{budget} entries"


def byte_words(count: float) -> str:
    """`256.0 KiB`."""
    power = min(3, max(0, math.floor(math.log2(max(count, 1)) / 10)))
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def rank_words(ends: Sequence[float], form: str = "") -> str:
    """`2` or `2-5`."""
    return "-".join(dict.fromkeys(format(end, form) for end in ends))


def number_words(value: float) -> str:
    """`1,024` or `63.5`."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"

"""Verdicts on a measured number beside a printed one: pure functions of numbers, one word each.

P is printed, M measured. The 95 % interval of M - P is compared with a margin d that was fixed beforehand: `agrees` if it lies
wholly inside +-d, `differs` if wholly outside, else `undecided`. The interval contains

- half of P's last printed digit, on both sides: a bound, added as it is;
- the spread over seeds, for a method that draws at random: Student's t of M's seeds, for M and P each a mean over as many;
- nothing of sampling where all of the paper's own items were asked: greedy decoding answers the same questions the same way.
  A part of them is `undecided`, whatever its numbers: a run takes the first items, so no interval can be given. Items that are
  not the paper's are not comparable and never come here.

Differences between kernels and libraries are not in it; the margin allows for them. An address whose margin is less than half a
digit and one answer is `uninformative`: a single answer would change its word. Perplexity, times and bytes are judged on the log
scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

AGREES, DIFFERS, UNDECIDED, UNINFORMATIVE = WORDS = "agrees", "differs", "undecided", "uninformative"
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
NOT_COMPARABLE = "not comparable"
ROUNDING = 1e-9
"""Rounding errors of our own arithmetic."""


@dataclass(frozen=True)
class Verdict:
    """A word, and the reason of `not comparable` and of an `undecided` without an interval."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a printed number, in the printed unit or on the log scale where `relative`.

    half: half of its last digit; step: one answer's worth; rival: the method whose printed number made the margin smaller;
    full: True where the full cache's printed number is within the margin, so that a method which drops nothing would agree.
    """

    half: float
    margin: float
    relative: bool = False
    step: float = 0.0
    rival: str = ""
    full: bool = False

    @property
    def informative(self) -> bool:
        """True where the margin is no finer than the printed digits and one answer."""
        return self.half + self.step <= self.margin + ROUNDING


def level(measured: float, printed: float, tolerance: Tolerance, seeds: float = 0.0) -> Verdict:
    """Judge a measured number whose items were all asked.

    Args:
        measured, printed: in the printed unit; with a `relative` tolerance both above 0.
        seeds: half of the 95 % interval over seeds (`of_seeds`).
    """
    return _of_gap(_gap(measured, printed, tolerance), tolerance, seeds)


def drop(
    measured: tuple[float, float], printed: tuple[float, float], tolerance: Tolerance, seeds: float = 0.0
) -> Verdict:
    """Judge a method's difference to `full`: (method, full) of each. The tolerance holds half a digit of both printed numbers."""
    return _of_gap(_gap(*measured, tolerance) - _gap(*printed, tolerance), tolerance, seeds)


def of_seeds(values: Sequence[float], relative: bool = False) -> float:
    """Return half of the 95 % interval of M - P over seeds, both means over as many as there are values; 0 without seeds."""
    if len(values) < 2:
        return 0.0
    from scipy.special import stdtrit

    numbers = [log(value) for value in values] if relative else values
    middle, n = sum(numbers) / len(numbers), len(numbers)
    variance = sum((number - middle) ** 2 for number in numbers) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * sqrt(2 * variance / n)


def lead(low: float | None, high: float | None) -> Verdict:
    """Judge a lead that a paper claims; low, high: interval of our paired difference, better above 0."""
    if low is not None and low > 0:
        return Verdict(CONFIRMED)
    return Verdict(CONTRADICTED if high is not None and high < 0 else UNDECIDED)


def _of_gap(gap: float, tolerance: Tolerance, seeds: float) -> Verdict:
    if not tolerance.informative:
        return Verdict(UNINFORMATIVE)
    low, high = gap - tolerance.half - seeds, gap + tolerance.half + seeds
    if low >= -tolerance.margin - ROUNDING and high <= tolerance.margin + ROUNDING:
        return Verdict(AGREES)
    outside = low > tolerance.margin + ROUNDING or high < -tolerance.margin - ROUNDING
    return Verdict(DIFFERS if outside else UNDECIDED)


def _gap(measured: float, printed: float, tolerance: Tolerance) -> float:
    return log(measured / printed) if tolerance.relative else measured - printed

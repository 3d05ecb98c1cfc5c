"""What is said of a measured number beside a printed one. Pure functions of numbers; every answer is exactly one word.

P is printed, M measured. What is judged is the 95 % interval of M - P, held against a margin d that was fixed beforehand:
`agrees` where it lies wholly inside +-d, `differs` where wholly outside, else `undecided`. In the interval are

- half of P's last printed digit, on both sides: a bound, added as it is;
- the spread over seeds, where a method draws at random: Student's t of M's seeds, for M and P each a mean over as many;
- nothing of sampling where the paper's own items were asked, all of them: greedy decoding answers the same questions the
  same way, so there is no other draw. Of a part of them no interval can be given, since a run takes the first ones and no
  random draw: that is `undecided`, whatever its numbers. Other items than the paper's are not comparable and come here never.

Not in it: what another kernel or library changes in an answer, of which nothing is known beforehand. The margin allows for it,
and an address whose margin is less than half a digit and one answer of its n is `uninformative`: a single answer would turn
its word. Where less than a number is meant (perplexity, times, bytes), all of it holds on the log scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

AGREES, DIFFERS, UNDECIDED, UNINFORMATIVE = WORDS = "agrees", "differs", "undecided", "uninformative"
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
NOT_COMPARABLE = "not comparable"
ROUNDING = 1e-9
"""Of our own arithmetic on the numbers that are compared."""


@dataclass(frozen=True)
class Verdict:
    """`why`: of what is not comparable, and of an `undecided` that no interval says."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


@dataclass(frozen=True)
class Tolerance:
    """What a printed number may differ by: half of its last digit, the margin and one answer's worth (`step`), in the printed
    unit, or on the log scale where `relative`. `rival`: whose printed number has made the margin smaller; `full`: the printed
    number of the full cache is within it, so that a method which drops nothing would agree too."""

    half: float
    margin: float
    relative: bool = False
    step: float = 0.0
    rival: str = ""
    full: bool = False

    @property
    def informative(self) -> bool:
        """Whether the printed number and its n can tell what the margin tells apart."""
        return self.half + self.step <= self.margin + ROUNDING


def level(measured: float, printed: float, limits: Tolerance, seeds: float = 0.0) -> Verdict:
    """Whether a measured number agrees with a printed one, all of whose items were asked.

    Args:
        measured, printed: in the printed unit; with `relative` limits both above 0.
        seeds: half of the 95 % interval over seeds (`of_seeds`).
    """
    return _of_gap(_gap(measured, printed, limits), limits, seeds)


def drop(measured: tuple[float, float], printed: tuple[float, float], limits: Tolerance, seeds: float = 0.0) -> Verdict:
    """Whether a method's difference to `full` agrees: (method, full) of each; both printed numbers' halves are in the limits'."""
    return _of_gap(_gap(*measured, limits) - _gap(*printed, limits), limits, seeds)


def of_seeds(values: Sequence[float], relative: bool = False) -> float:
    """Half of the 95 % interval of M - P over seeds, both means over as many as there are values; 0 where no seed is drawn."""
    if len(values) < 2:
        return 0.0
    from scipy.special import stdtrit

    numbers = [log(value) for value in values] if relative else values
    middle, n = sum(numbers) / len(numbers), len(numbers)
    variance = sum((number - middle) ** 2 for number in numbers) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * sqrt(2 * variance / n)


def lead(low: float | None, high: float | None) -> Verdict:
    """Whether a lead that a paper claims is ours too; low, high: interval of our paired difference, better above 0."""
    if low is not None and low > 0:
        return Verdict(CONFIRMED)
    return Verdict(CONTRADICTED if high is not None and high < 0 else UNDECIDED)


def _of_gap(gap: float, limits: Tolerance, seeds: float) -> Verdict:
    if not limits.informative:
        return Verdict(UNINFORMATIVE)
    low, high = gap - limits.half - seeds, gap + limits.half + seeds
    if low >= -limits.margin - ROUNDING and high <= limits.margin + ROUNDING:
        return Verdict(AGREES)
    outside = low > limits.margin + ROUNDING or high < -limits.margin - ROUNDING
    return Verdict(DIFFERS if outside else UNDECIDED)


def _gap(measured: float, printed: float, limits: Tolerance) -> float:
    return log(measured / printed) if limits.relative else measured - printed

"""What is said of a measured number beside a printed one. Pure functions of numbers; every answer is exactly one word.

P is printed, M measured, r half of P's last digit, d a margin fixed beforehand and v the spread of a rerun (`margins.yaml`).
Same items: M agrees where |M - P| <= r + d + v, else it differs; our own sampling interval says nothing there, since the paper
asked the same questions. Another draw of items: the 95 % interval of the difference, made wider by the paper's own draw,
lies inside +-(r + d) (agrees), outside of it (differs), or neither (undecided, with the number of samples that would decide).
Where less than a number is meant (perplexity, times), all of it holds on the log scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite, log, sqrt

AGREES, DIFFERS, UNDECIDED = "agrees", "differs", "undecided"
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
NOT_COMPARABLE = "not comparable"
ROUNDING = 1e-9
"""Of our own arithmetic on the numbers that are compared."""


@dataclass(frozen=True)
class Verdict:
    """`needed`: samples that would decide, where it is undecided and any number would; `why`: of what is not comparable, or is
    undecided since a reading is missing."""

    word: str
    needed: int | None = None
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.word}: {self.why}"
        return f"{self.word} (needs n = {self.needed:,})" if self.needed else self.word


@dataclass(frozen=True)
class Limits:
    """r, d and v in the printed unit; `relative`: d and v are shares of the printed value, on the log scale."""

    half: float
    margin: float
    spread: float = 0.0
    relative: bool = False


def level(
    measured: float,
    printed: float,
    limits: Limits,
    *,
    same_items: bool = True,
    interval: tuple[float, float] | None = None,
    n: int = 0,
    n_paper: int | None = None,
) -> Verdict:
    """Whether a measured number agrees with a printed one.

    Args:
        measured, printed: in the printed unit; with `relative` limits both above 0.
        same_items: whether the same items were asked; else `interval` is ours (95 %), `n` our samples and `n_paper` theirs,
            None where nobody knows: then nothing is said.
    """
    gap, half = _gap(measured, printed, limits), _half(printed, limits)
    if same_items:
        return _within(gap, half + limits.margin + limits.spread)
    if interval is None or not n or not n_paper:
        return Verdict(UNDECIDED)
    wider = sqrt(1 + n / n_paper)
    low, high = (gap + wider * (_gap(end, printed, limits) - gap) for end in interval)
    return _of_interval(gap, low, high, half + limits.margin, n)


def drop(
    measured: tuple[float, float], printed: tuple[float, float], halves: tuple[float, float], limits: Limits
) -> Verdict:
    """Whether a method's difference to `full` agrees: (method, full) of each. Both printed numbers are rounded."""
    own = _gap(measured[0], measured[1], limits)
    theirs = _gap(printed[0], printed[1], limits)
    half = sum(_half(value, Limits(one, 0, 0, limits.relative)) for value, one in zip(printed, halves, strict=True))
    return _within(own - theirs, half + limits.margin + limits.spread)


def lead(low: float | None, high: float | None) -> Verdict:
    """Whether a lead that a paper claims is ours too; low, high: interval of our paired difference, better above 0."""
    if low is not None and low > 0:
        return Verdict(CONFIRMED)
    return Verdict(CONTRADICTED if high is not None and high < 0 else UNDECIDED)


def of_readings(verdicts: Mapping[str, Verdict | None]) -> Verdict | None:
    """The word over all readings that were declared beforehand, the table's own first; None for one without a number.

    It agrees if one does, and differs only if every one does: with one that was not run or is not comparable it is undecided.
    """
    (_, own), *others = verdicts.items()
    if own is None or own.word == NOT_COMPARABLE:
        return own
    known = [own, *(verdict for _, verdict in others if verdict is not None)]
    for word in (AGREES, UNDECIDED):
        for verdict in known:
            if verdict.word == word:
                return verdict
    lacking = [name for name, verdict in others if verdict is None or verdict.word == NOT_COMPARABLE]
    return Verdict(UNDECIDED, why=f"differs as read here; not judged as {', '.join(lacking)}") if lacking else own


def _within(gap: float, limit: float) -> Verdict:
    return Verdict(AGREES if abs(gap) <= limit + ROUNDING else DIFFERS)


def _of_interval(gap: float, low: float, high: float, limit: float, n: int) -> Verdict:
    if low >= -limit and high <= limit:
        return Verdict(AGREES)
    if low > limit or high < -limit:
        return Verdict(DIFFERS)
    room = abs(abs(gap) - limit)
    width = max(gap - low, high - gap)
    if room <= ROUNDING or not isfinite(width):
        return Verdict(UNDECIDED)
    return Verdict(UNDECIDED, needed=max(ceil(n * (width / room) ** 2), n + 1))


def _gap(measured: float, printed: float, limits: Limits) -> float:
    return log(measured / printed) if limits.relative else measured - printed


def _half(printed: float, limits: Limits) -> float:
    return log((printed + limits.half) / printed) if limits.relative else limits.half

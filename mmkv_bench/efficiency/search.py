"""`batch=max`: which numbers of sequences are tried, from outcomes alone.

Peaks are linear in the batch from some size on, so the line through the two largest counted sizes is followed to the limit. It
is only a guess: the answer is a size that fits where one more was tried and did not. Where the line misleads, sizes grow
geometrically below the first failure, and every other one halves what is left above the largest that fits. What comes next
depends on nothing but outcomes, so a search that was interrupted goes on from its rows, and a finished one has nothing to try.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_GROWTH = 4
"""No size is larger than so many times the largest that fitted: its prompts are all made before it runs."""


class PassOutcome(str):
    """A status (`ok`, `oom`, ...), with the most bytes that its pass held where they are known. copied: most of its sequences
    were copies of a few, so that it says where to look and is no answer."""

    peak: int | None
    copied: bool

    def __new__(cls, status: str, peak: int | None = None, copied: bool = False) -> PassOutcome:
        """A status that equals its text."""
        made = super().__new__(cls, status)
        made.peak, made.copied = peak, copied
        return made


@dataclass
class Search:
    """The search of one cell and length.

    Attributes:
        tried: numbers of sequences whose outcome is known, in their order; next: the one to try, None when the search is over.
        largest: the most that fit so far. stopped: the search ended at a failure that is no want of memory.
    """

    tried: list[int] = field(default_factory=list)
    next: int | None = None
    largest: int = 0
    stopped: bool = False


def search_state(outcomes: Mapping[int, str], limit: int | None = None) -> Search:
    """The state of a search.

    Args:
        outcomes: number of sequences -> how its pass ended; a `PassOutcome` has its peak.
        limit: bytes that a pass may hold, None where they are not known: sizes are then doubled, and bisected.
    """
    known: dict[int, str] = {}
    search = _stands(known, limit)
    while search.next is not None and search.next in outcomes:
        known[search.next] = outcomes[search.next]
        search = _stands(known, limit)
    if search.next is not None and len(known) < len(outcomes):  # sizes of another way to search
        search = _stands(known | dict(outcomes), limit)
    return search


def _stands(known: Mapping[int, str], limit: int | None) -> Search:
    """The state after outcomes in their order."""
    fails = min((size for size, status in known.items() if status == "oom"), default=None)
    fits = sorted(size for size, status in known.items() if status == "ok" and (fails is None or size < fails))
    search = Search([*known], None, fits[-1] if fits else 0)
    search.stopped = any(status not in ("ok", "oom") for status in known.values())
    if search.stopped or (fails is not None and fails - search.largest <= 1):
        return search
    low = search.largest
    guess = _on_the_line({size: getattr(known[size], "peak", None) for size in fits[-2:]}, limit)
    if fails is not None:
        halved = guess is None or (len(known) % 2 == 0 and fails - low > 4)
        search.next = (low + fails) // 2 if halved or guess is None else min(max(guess, low + 1), fails - 1)
    elif low == 0:
        search.next = 1
    elif guess is None:
        search.next = (2 if limit is None else _GROWTH) * low
    else:
        n_near = sum(4 * size >= 3 * low for size in fits)  # each that fitted where the line ended doubles the stride
        search.next = min(max(guess, low + 2 ** (n_near - 1)), _GROWTH * low)
    return search


def _on_the_line(peaks: Mapping[int, int | None], limit: int | None) -> int | None:
    """The largest size whose peak is within the limit on the line through two; None where there is no rising line."""
    if len(peaks) < 2 or limit is None:
        return None
    (one, low), (other, high) = peaks.items()
    if low is None or high is None or high <= low:
        return None
    return other + max(0, limit - high) * (other - one) // (high - low)

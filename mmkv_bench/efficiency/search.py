"""`batch=max`: which numbers of sequences to try, decided from the outcomes of passes alone.

From some size on, peaks grow linearly with the batch. So the line through the two largest counted sizes is extended to the limit.
This is only a guess. The result must be a size that was tested and fits, while one sequence more was tested and failed. If the
line misleads, sizes grow geometrically below the first failure, and every other size halves the range above the largest that
fits. The next size depends only on outcomes, so an interrupted search continues from its rows, and a finished search has nothing
to try.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_GROWTH = 4
"""Maximum factor from the largest size that fitted to the next size, because all its prompts are made before it runs."""


class PassOutcome(str):
    """The status of a pass (`ok`, `oom`, ...) as a string, with the pass's peak bytes, if known.

    copied: most sequences were copies of a few, so the outcome guides the search but is no result.
    """

    peak: int | None
    copied: bool

    def __new__(cls, status: str, peak: int | None = None, copied: bool = False) -> PassOutcome:
        """Make an outcome that equals the text of its status."""
        made = super().__new__(cls, status)
        made.peak, made.copied = peak, copied
        return made


@dataclass
class Search:
    """How far the search for the largest batch of one cell and prompt length has come.

    Attributes:
        tried: numbers of sequences with known outcomes, in order.
        next: the number of sequences to try next, None if the search is over.
        largest: the largest number that fitted so far.
        stopped: whether the search ended at a failure other than out of memory.
    """

    tried: list[int] = field(default_factory=list)
    next: int | None = None
    largest: int = 0
    stopped: bool = False


def search_state(outcomes: Mapping[int, str], limit: int | None = None) -> Search:
    """Return how far a search for the largest batch has come, and which number of sequences to try next.

    Args:
        outcomes: number of sequences to its pass's status. A `PassOutcome` also has the peak.
        limit: maximum bytes of a pass; None if unknown. Then sizes are doubled until one fails, then bisected.
    """
    known: dict[int, str] = {}
    search = _stands(known, limit)
    while search.next is not None and search.next in outcomes:
        known[search.next] = outcomes[search.next]
        search = _stands(known, limit)
    if search.next is not None and len(known) < len(outcomes):  # outcomes of another search strategy
        search = _stands(known | dict(outcomes), limit)
    return search


def _stands(known: Mapping[int, str], limit: int | None) -> Search:
    """Return the state of a search from the outcomes known so far.

    known: number of sequences to status, in the order in which they were tried.
    """
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
        near = sum(4 * size >= 3 * low for size in fits)  # each size that fitted near the line's end doubles the stride
        search.next = min(max(guess, low + 2 ** (near - 1)), _GROWTH * low)
    return search


def _on_the_line(peaks: Mapping[int, int | None], limit: int | None) -> int | None:
    """Return the largest batch whose extrapolated peak memory is within the limit.

    The peak is extrapolated by a line through the peaks of two batches. None if the line does not rise.

    peaks: number of sequences to peak bytes.
    """
    if len(peaks) < 2 or limit is None:
        return None
    (one, low), (other, high) = peaks.items()
    if low is None or high is None or high <= low:
        return None
    return other + max(0, limit - high) * (other - one) // (high - low)

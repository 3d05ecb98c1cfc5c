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
        outcome = super().__new__(cls, status)
        outcome.peak, outcome.copied = peak, copied
        return outcome


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
    known_outcomes: dict[int, str] = {}
    search = _stands(known_outcomes, limit)
    while search.next is not None and search.next in outcomes:
        known_outcomes[search.next] = outcomes[search.next]
        search = _stands(known_outcomes, limit)
    if search.next is not None and len(known_outcomes) < len(outcomes):  # outcomes of another search strategy
        search = _stands(known_outcomes | dict(outcomes), limit)
    return search


def _stands(known: Mapping[int, str], limit: int | None) -> Search:
    """Return the state of a search from the outcomes known so far.

    known: number of sequences to status, in the order in which they were tried.
    """
    smallest_failure = min((size for size, status in known.items() if status == "oom"), default=None)
    fitting_sizes = sorted(
        size
        for size, status in known.items()
        if status == "ok" and (smallest_failure is None or size < smallest_failure)
    )
    search = Search([*known], None, fitting_sizes[-1] if fitting_sizes else 0)
    search.stopped = any(status not in ("ok", "oom") for status in known.values())
    if search.stopped or (smallest_failure is not None and smallest_failure - search.largest <= 1):
        return search
    largest_fit = search.largest
    guessed_size = _on_the_line({size: getattr(known[size], "peak", None) for size in fitting_sizes[-2:]}, limit)
    if smallest_failure is not None:
        must_halve = guessed_size is None or (len(known) % 2 == 0 and smallest_failure - largest_fit > 4)
        search.next = (
            (largest_fit + smallest_failure) // 2
            if must_halve or guessed_size is None
            else min(max(guessed_size, largest_fit + 1), smallest_failure - 1)
        )
    elif largest_fit == 0:
        search.next = 1
    elif guessed_size is None:
        search.next = (2 if limit is None else _GROWTH) * largest_fit
    else:
        sizes_near_largest = sum(
            4 * size >= 3 * largest_fit for size in fitting_sizes
        )  # each size that fitted near the line's end doubles the stride
        search.next = min(max(guessed_size, largest_fit + 2 ** (sizes_near_largest - 1)), _GROWTH * largest_fit)
    return search


def _on_the_line(peaks: Mapping[int, int | None], limit: int | None) -> int | None:
    """Return the largest batch whose extrapolated peak memory is within the limit.

    The peak is extrapolated by a line through the peaks of two batches. None if the line does not rise, or a
    peak or the limit is unknown.

    peaks: number of sequences to peak bytes.
    """
    if len(peaks) < 2 or limit is None:
        return None
    (first_size, first_peak), (second_size, second_peak) = peaks.items()
    if first_peak is None or second_peak is None or second_peak <= first_peak:
        return None
    return second_size + max(0, limit - second_peak) * (second_size - first_size) // (second_peak - first_peak)

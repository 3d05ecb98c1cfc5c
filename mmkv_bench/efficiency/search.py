"""`batch=max`: search for the largest number of sequences that fits into memory.

Peak memory grows linearly from some batch size on. So the next size is guessed by a line through the two largest sizes
that fit. If the line misleads, sizes grow geometrically, or every other size halves the range below the first failure.
The search ends with a size that fits while one sequence more does not. It depends only on outcomes of passes, so an
interrupted search continues from its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_GROWTH = 4
"""Maximum factor from the largest fitting size to the next size, because all prompts of a size are made before its
pass."""


class PassOutcome(str):
    """Status of a pass (`ok`, `oom`, ...) as a string, with the pass's peak bytes, if known.

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
    """State of the search for the largest batch of one cell and prompt length.

    Attributes:
        tried: numbers of sequences with known outcomes, in order.
        next: number of sequences to try next, None if the search is over.
        largest: largest number that fitted so far.
        stopped: whether the search ended at a failure other than out of memory.
    """

    tried: list[int] = field(default_factory=list)
    next: int | None = None
    largest: int = 0
    stopped: bool = False


def search_state(outcomes: Mapping[int, str], limit: int | None = None) -> Search:
    """Return the state of a search, with the number of sequences to try next.

    Args:
        outcomes: number of sequences -> status of its pass, a `PassOutcome` if the peak is known.
        limit: maximum bytes of a pass; None if unknown. Then sizes are doubled until one fails, and bisected after
            that.
    """
    known_outcomes: dict[int, str] = {}
    search = _state(known_outcomes, limit)
    while search.next is not None and search.next in outcomes:
        known_outcomes[search.next] = outcomes[search.next]
        search = _state(known_outcomes, limit)
    if search.next is not None and len(known_outcomes) < len(outcomes):  # outcomes of another search strategy
        search = _state(known_outcomes | dict(outcomes), limit)
    return search


def _state(known: Mapping[int, str], limit: int | None) -> Search:
    """Return the state of a search. known: number of sequences -> status, in the order in which they were tried."""
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
    guessed_size = _extrapolated_batch({size: getattr(known[size], "peak", None) for size in fitting_sizes[-2:]}, limit)
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
        # Each size that fitted near the largest doubles the stride.
        sizes_near_largest = sum(4 * size >= 3 * largest_fit for size in fitting_sizes)
        search.next = min(max(guessed_size, largest_fit + 2 ** (sizes_near_largest - 1)), _GROWTH * largest_fit)
    return search


def _extrapolated_batch(peaks: Mapping[int, int | None], limit: int | None) -> int | None:
    """Return the largest batch that a line through two peaks (sequences -> bytes) allows.

    None if the line does not rise, or if a peak or the limit is unknown.
    """
    if len(peaks) < 2 or limit is None:
        return None
    (first_size, first_peak), (second_size, second_peak) = peaks.items()
    if first_peak is None or second_peak is None or second_peak <= first_peak:
        return None
    return second_size + max(0, limit - second_peak) * (second_size - first_size) // (second_peak - first_peak)

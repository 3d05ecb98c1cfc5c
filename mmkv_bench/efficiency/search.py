"""`batch=max`: which numbers of sequences are tried, from what was found so far alone.

Doubled until something does not fit, then bisected. What comes next depends on nothing but outcomes, so a search that was
interrupted goes on from its rows, and a finished one has nothing to try.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Search:
    """Of one cell and length.

    Attributes:
        tried: numbers of sequences whose outcome is known, in their order; next: what is to be tried, None when it is over.
        largest: the most that fit so far. stopped: it ended at a failure that is no want of memory.
    """

    tried: list[int] = field(default_factory=list)
    next: int | None = None
    largest: int = 0
    stopped: bool = False


def searched(outcome: Callable[[int], str | None]) -> Search:
    """Where a search stands.

    Args:
        outcome: status of a number of sequences (`ok`, `oom`, ...), None where it was not tried.
    """
    search, fails = Search(), None
    while fails is None or fails - search.largest > 1:
        size = max(1, 2 * search.largest) if fails is None else (search.largest + fails) // 2
        status = outcome(size)
        if status is None:
            search.next = size
            break
        search.tried.append(size)
        if status == "ok":
            search.largest = size
        elif status == "oom":
            fails = size
        else:
            search.stopped = True
            break
    return search

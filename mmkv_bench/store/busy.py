"""What rows of `timings` say of other work on the machine: `load` is counted in every pass, and belongs beside its times."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from statistics import median


def busy(loads: Iterable[float], threads: Iterable[float]) -> str | None:
    """One sentence where the machine did more than these passes, None where it did not or nobody knows.

    Args:
        loads: average load of the last minute, behind each pass; threads: that each pass had. NaN where they are not known.
    """
    known = [load for load in loads if not isnan(load)]
    own = max((count for count in threads if not isnan(count)), default=None)
    if not known or own is None or median(known) < own + 1:
        return None
    thread = "1 thread" if own == 1 else f"{own:.0f} threads"
    return (
        f"other work on the machine, whose load was {median(known):.1f} (median) beside passes of {thread}: times are longer "
        "than when it is idle"
    )

"""Stop signals wait for the current sample: it is stored, the journal is published, then the run ends.

Batch systems announce the end of a job by a signal (USR1 or USR2 before a time limit, TERM at preemption and `scancel`). An
exception raised at once could land anywhere, even in code that turns a sample's failure into a row. So the signal is only
remembered, and `check` raises where no work is half done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_received: list[int] = []
"""Signals received since `deferred` began, in order."""


class Stopped(BaseException):
    """The run was asked to end, and ended between two samples. Not an `Exception`, so that code for a sample's failure does
    not catch it.

    Attributes:
        signal: the number of the first signal received.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextmanager
def deferred() -> Iterator[None]:
    """Remember stop signals inside the block for `check`. A signal after the last check is raised at the end of the block.

    Afterwards the earlier handlers are restored. In other threads than the main thread, where Python allows no handlers,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    before = {number: signal.signal(number, _remember) for number in SIGNALS}
    try:
        yield
        check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _received.clear()


def check() -> None:
    """Raise Stopped if a stop signal has come. Called where rows are stored and no work is half done."""
    if _received:
        raise Stopped(_received[0])


def _remember(number: int, _frame: Any) -> None:
    _received.append(number)

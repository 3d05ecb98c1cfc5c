"""Stop signals wait for the sample in flight: it is stored, what is in the journal published, then the run ends.

Batch systems announce the end of a job by a signal (USR1 or USR2 before a time limit, TERM at preemption and `scancel`).
Raised at once it could land anywhere, also where one sample's fault is caught and made a row; so it is only remembered
here, and `check` raises it where nothing is half done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_received: list[int] = []
"""Signals since `deferred` began, the first one first."""


class Stopped(BaseException):
    """The run was asked to end, and did so between two samples. No `Exception`: what handles a sample's fault must not
    take it for one.

    Attributes:
        signal: the number of the first signal that came.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextmanager
def deferred() -> Iterator[None]:
    """Remember stop signals that come inside, for `check`; one that came after the last check is raised at the end.
    Handlers are as before then. In another thread than the main one, where Python allows no handlers, nothing changes.
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
    """Raises Stopped when a stop signal has come. Called where rows are stored and nothing is under way."""
    if _received:
        raise Stopped(_received[0])


def _remember(number: int, _frame: Any) -> None:
    _received.append(number)

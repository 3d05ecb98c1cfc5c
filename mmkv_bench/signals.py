"""Time limits and stop signals.

An alarm limits the time of calls that cannot check the time themselves, such as chat templates and processors of
others. Batch systems announce the end of a job by a signal (USR1 or USR2 before a time limit, TERM at preemption and
`scancel`). An exception raised at once could land anywhere, even in code that turns a sample's failure into a row. So
the signal is only remembered, and `check_stop` raises after the current sample is stored.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mmkv_bench.errors import GenerationTimeout

_CONTEXT_MODULES = ("contextlib", __name__)


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Limit the time of a block to `seconds` (None: no limit). what: name of the block's work, for the message.

    In the main thread of a POSIX process an alarm interrupts slow Python code, endless loops included. A call into
    compiled code is interrupted only when it returns. Other threads and systems have no alarms, so the time is checked
    at the end of the block. An alarm that was set before is set again afterwards, with the rest of its time.

    Raises GenerationTimeout: the block took longer; also if the block swallowed the alarm's exception.
    """
    if seconds is None:
        yield
        return
    start_time, timeout_error = time.monotonic(), GenerationTimeout(f"{what} ran past timeout_s")
    with _alarm(seconds, timeout_error):
        yield
    if time.monotonic() - start_time > seconds:
        raise timeout_error


@contextmanager
def _alarm(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the block after `seconds`. Without alarms (other threads, other systems) do nothing."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_block_running = False

    def ring(_: int, frame: FrameType | None) -> None:
        if not is_block_running:  # `time_limit` checks the time when the block has ended
            return
        if frame is not None and frame.f_globals.get("__name__") in _CONTEXT_MODULES:
            # Raised between here and the block, the error would leave the alarm set, and it would ring in later code.
            signal.setitimer(signal.ITIMER_REAL, 0.001, 1.0)
            return
        raise error

    start_time, earlier_handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    earlier_alarm_s = earlier_interval_s = 0.0
    try:
        # The alarm rings again after 1 s, should a destructor swallow the first error.
        earlier_alarm_s, earlier_interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        is_block_running = True
        yield
    finally:
        is_block_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier_handler)
        if earlier_alarm_s:
            signal.setitimer(
                signal.ITIMER_REAL, max(earlier_alarm_s - (time.monotonic() - start_time), 1e-6), earlier_interval_s
            )


# ---------------------------------------------------------------------- stop signals
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_received: list[int] = []
"""Signals received since `defer_stop_signals` began, in order."""


class Stopped(BaseException):
    """Raised to end a run between two samples after a stop signal. signal: number of the first signal received.

    Not an `Exception`, so no handler of a sample's failure catches it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextmanager
def defer_stop_signals() -> Iterator[None]:
    """Catch stop signals inside the block without interrupting the work; `check_stop` then raises `Stopped`.

    A signal after the last check is raised at the end of the block. Then the earlier handlers are restored. Outside of
    the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    earlier_handlers = {number: signal.signal(number, lambda got, _: _received.append(got)) for number in SIGNALS}
    try:
        yield
        check_stop()
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _received.clear()


def check_stop() -> None:
    """Raise `Stopped` if a stop signal has come. Called where rows are stored and no work is half done."""
    if _received:
        raise Stopped(_received[0])

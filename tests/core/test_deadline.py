"""Promise: work that looks at no clock ends at `timeout_s`, and nobody else's alarm is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from mmkv_bench.generation.result import GenerationTimeout
from mmkv_bench.signals import time_limit
from tests.each import each


def forever() -> None:
    while True:
        pass


def swallowing() -> None:
    with contextlib.suppress(Exception):  # as a library may
        forever()


@each("work", [forever, swallowing])
def test_python_code_without_end_is_ended(work):
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(GenerationTimeout, match="^the prompt ran past timeout_s$"), time_limit(0.05, "the prompt"):
        work()
    assert signal.getsignal(signal.SIGALRM) is before
    with time_limit(60, "the prompt"), time_limit(None, "the prompt"):
        pass


@pytest.mark.slow
def test_an_alarm_that_rings_as_the_block_is_entered_or_left_is_switched_off():
    before = signal.getsignal(signal.SIGALRM)
    try:
        for step in range(600):
            with contextlib.suppress(GenerationTimeout), time_limit(1e-9 + step % 60 * 1e-6, "the prompt"):
                pass
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
            assert signal.getsignal(signal.SIGALRM) is before
        with pytest.raises(GenerationTimeout), time_limit(1e-9, "the prompt"):
            forever()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_alarm_of_someone_else_still_rings():
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with time_limit(60, "the prompt"):
            time.sleep(0.4)
        while not rung:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_the_time_is_looked_at_afterwards():
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with time_limit(0.01, "the prompt"):
                time.sleep(0.05)
        except GenerationTimeout as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1

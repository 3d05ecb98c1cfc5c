"""Promise: every sample goes to one living process, and what a dead one had and had not answered goes to another."""

from __future__ import annotations

import threading

import pytest

from mmkv_bench.run.dispatch import VARIABLE, Dispatcher, SampleQueueClient

SAMPLES = [("d", str(number)) for number in range(40)]


@pytest.fixture
def processes(monkeypatch):
    """A function that gives the ends of so many processes that are handed the same samples."""

    def made(count: int) -> list[SampleQueueClient]:
        dispatcher, ends = Dispatcher(), []
        for _ in range(count):
            with dispatcher.connect() as theirs:
                monkeypatch.setenv(VARIABLE, str(theirs.fileno()))
                ends.append(SampleQueueClient())
        return ends

    return made


def work(mine: SampleQueueClient, answered: list, dies_at: int | None = None) -> None:
    """As a run goes through its samples; where it dies it has one that it has not answered."""
    while True:
        for key in SAMPLES:
            if mine.take(*key):
                if dies_at == len(answered):
                    mine.close()
                    return
                answered.append(key)
                mine.done(*key)
        if not mine.again():
            mine.close()
            return


def side_by_side(*jobs) -> None:
    threads = [threading.Thread(target=work, args=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_every_sample_is_answered_once_and_the_dead_ones_by_those_that_are_left(processes):
    for dying in range(3):
        answered: list[list] = [[], [], []]
        ends = processes(3)
        side_by_side(*((ends[number], answered[number], 0 if number < dying else None) for number in range(3)))
        assert sorted(sum(answered, [])) == sorted(SAMPLES) and not sum(answered[:dying], [])


def test_a_process_that_waits_can_be_stopped_and_one_alone_takes_everything(processes, monkeypatch):
    class Stopped(Exception):
        pass

    def check():
        raise Stopped

    busy, waiting = processes(2)
    assert busy.take("d", "0")
    waiting._check = check
    with pytest.raises(Stopped):
        waiting.again()
    monkeypatch.delenv(VARIABLE)
    alone = SampleQueueClient()
    assert alone.take("d", "0") and alone.take("d", "0") and not alone.again()


def test_what_nobody_wants_any_more_keeps_nobody_for_ever(processes):
    lost, left = processes(2)
    assert lost.take("d", "0")
    lost.close()
    assert left.again()
    assert not left.again()  # it came back and did not take it

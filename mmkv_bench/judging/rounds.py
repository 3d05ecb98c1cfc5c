"""Passes through a scorer until it has asked all it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mmkv_bench.judging.client import asking
from mmkv_bench.judging.desk import Desk
from mmkv_bench.judging.known import JUDGED
from mmkv_bench.judging.sitting import Sitting

Result = TypeVar("Result")
ROUNDS = 12  # a scorer whose every question follows from the answer before needs one more than it has questions


def in_rounds(task: str, desk: Desk, one_pass: Callable[[Sitting], Result]) -> tuple[Result, Sitting]:
    """What the last pass gave, with its sitting. A task that asks no judge has one pass.

    A scorer that asks new questions without end is left after `ROUNDS` passes; its samples are not judged.
    """
    for _ in range(ROUNDS):
        sitting = Sitting(desk, JUDGED.get(task, ()))
        with asking(sitting):
            result = one_pass(sitting)
        if not desk.waiting:
            break
        desk.fetch()
    return result, sitting

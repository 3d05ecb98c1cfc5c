"""Passes through a scorer until it has asked all it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mmkv_bench.judging.client import asking
from mmkv_bench.judging.known_judges import JUDGED
from mmkv_bench.judging.ledger import Ledger
from mmkv_bench.judging.scoring_pass import ScoringPass

Result = TypeVar("Result")
ROUNDS = 12  # a scorer whose every question follows from the answer before needs one more than it has questions


def in_rounds(task: str, ledger: Ledger, one_pass: Callable[[ScoringPass], Result]) -> tuple[Result, ScoringPass]:
    """What the last pass gave, with its scoring_pass. A task that asks no judge has one pass.

    A scorer that asks new questions without end is left after `ROUNDS` passes; its samples are not judged.
    """
    passes = 0
    while True:
        scoring_pass = ScoringPass(ledger, JUDGED.get(task, ()))
        with asking(scoring_pass):
            result = one_pass(scoring_pass)
        passes += 1
        if waiting := ledger.waiting:
            ledger.fetch()
        if not waiting or passes == ROUNDS:
            return result, scoring_pass

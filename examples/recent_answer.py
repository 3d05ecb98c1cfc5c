"""Recent answer: KeyDiff's choice of the prompt stays; of the answer, only the newest tokens do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.decoding.holding import Holding
from mmkv_bench.compression.scorers.keydiff import KeyDiffScorer


class Scores(KeyDiffScorer):
    """KeyDiff's, as they are."""


@dataclass(frozen=True)
class RecentAnswer(Holding):
    """Heads grow by `slack` answer tokens; from then on a new one costs the oldest of the answer."""

    hold: Literal["ratio", "size"] = "size"
    slack: int = 8

    def slot(self, entries: int, start: int) -> int:
        return start - self.slack  # the first entry after those of the prompt

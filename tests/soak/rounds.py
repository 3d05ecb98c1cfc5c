"""Rounds of shots until there are enough of them, each step compared with an uninterrupted run."""

from __future__ import annotations

import collections
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmkv_bench.store.store import Store
from tests.run import setting
from tests.soak.runs import said, starter
from tests.soak.shot import LIMITS, Pace, Shot, paced
from tests.store.store_examples import journal_damage

_MOST = 10  # kills of a step; its last run is left alone


class Stopped(Exception):
    """Somebody ended the soak with a signal."""


@dataclass
class Met:
    """What was met so far. counts: kills, those of forked runs, steps, samples by killed runs, torn lines; pace: of an
    uninterrupted run."""

    cells: int = 0
    pace: Pace | None = None
    stopped: str = ""
    minutes: float = 0.0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    moments: collections.Counter[str] = field(default_factory=collections.Counter)


class Soak:
    """`go` fills `met`, which is right at any moment."""

    def __init__(self, folder: Path, kills: int, seed: int, minutes: float) -> None:
        self.met = Met()
        self._folder, self._kills, self._minutes, self._rng = folder, kills, minutes, random.Random(seed)
        self._begin = time.monotonic()

    def go(self) -> None:
        """Until that many kills, or until the time is over: the step that is under way then is still ended and compared; or
        until somebody ends it (TERM, INT): then at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        try:
            with starter() as self._start:
                self._rounds()
        except Stopped as stop:
            self.met.stopped = str(stop)
        finally:
            self.met.minutes = (time.monotonic() - self._begin) / 60

    def _rounds(self) -> None:
        self._expected = {limit: self._uninterrupted(limit) for limit in LIMITS}
        number = 0
        while not self._over():
            self._round(self._folder / f"round{number:04d}")
            shutil.rmtree(self._folder / f"round{number - 1:04d}", ignore_errors=True)
            number += 1

    def _over(self) -> bool:
        return self.met.counts["kills"] >= self._kills or time.monotonic() - self._begin > 60 * self._minutes

    def _uninterrupted(self, limit: int) -> dict[str, Any]:
        root = self._folder / f"uninterrupted{limit}"
        self.met.pace = paced(self._start, root, limit)
        self.met.cells = len(setting.cells(root))
        self._tell(f"uninterrupted, {limit} samples: {self.met.pace}")
        return setting.everything(root)

    def _round(self, root: Path) -> None:
        for limit in LIMITS:
            self._step(root, limit)
            assert setting.everything(root) == self._expected[limit], "other rows than the uninterrupted run's"
            assert not Store(root).journals() and not list(root.rglob(".*.tmp")), "leftovers of a killed run"
            self.met.counts["steps"] += 1
            if self._over():
                return

    def _step(self, root: Path, limit: int) -> None:
        """Runs of one command until one ends by itself."""
        met, pace = self.met, self.met.pace
        assert pace is not None
        for _ in range(_MOST):
            if self._over():
                break
            shot = Shot(self._start, root, limit, pace, self._rng)
            if shot.code != -signal.SIGKILL:
                assert shot.code == 0, said(root)
                return
            added = shot.check(met.cells, self._expected[LIMITS[-1]])
            met.counts.update({"kills": 1, "samples": added, "torn lines": len(journal_damage(shot.store))})
            met.counts["forked"] += shot.forked
            met.moments[shot.moment] += 1
            self._tell(f"{met.counts['kills']} of {self._kills} kills, {root.name}, {limit} samples, {shot.moment}")
        self._start.ended(root, limit)

    def _tell(self, text: str) -> None:
        print(f"[{(time.monotonic() - self._begin) / 60:5.1f} min] {text}", file=sys.stderr, flush=True)


def _stop(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise Stopped(signal.Signals(number).name)

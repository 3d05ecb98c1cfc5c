"""One run that is killed, and what it left."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmkv_bench.store.store import Store
from tests.run import setting
from tests.soak.runs import Starter, said

LIMITS = (20, 40, 60)
"""Samples of a round's steps: the scores of one are replaced by the next's."""
MOMENTS = {"amid the samples": 0.55, "publishing": 0.15, "after the last sample": 0.2, "anywhere": 0.1}
PATIENCE = 900  # seconds that a run may take for its next step


@dataclass(frozen=True)
class Pace:
    """What an uninterrupted run took here, in seconds: until its first stored sample, and from its last one to its end.
    Moments are drawn by it: on any machine all of a run is hit, and nobody waits for a run that has ended."""

    start: float
    tail: float


def paced(start: Starter, root: Path, limit: int) -> Pace:
    """Of a run that nobody stops."""
    begin = time.monotonic()
    first = last = 0.0
    count, store = 0, Store(root)
    with start.running(root, limit) as run:
        while run.poll() is None:
            now = len(store.responses(columns=["cell"]))
            if now != count:
                first, last, count = first or time.monotonic(), time.monotonic(), now
            time.sleep(0.05)
        assert run.wait() == 0, said(root)
    return Pace(first - begin, time.monotonic() - last)


class Shot:
    """One run and its end.

    Attributes:
        seen: the rows (cell, sample) -> (commit, worker) that were there before and while it ran.
        moment: what it was killed at; forked: whether it began with imported libraries; those that are killed anywhere, while
            they import too, are the command itself. code: its exit code.
    """

    def __init__(self, start: Starter, root: Path, limit: int, pace: Pace, rng: random.Random) -> None:
        self.root, self.store, self.seen = root, Store(root), setting.commits(root)
        self.before, self._limit = self._samples(), limit
        self.moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        target = self.before + rng.randint(1, 12)
        self.forked = self.moment != "anywhere"
        with start.running(root, limit, self.forked) as self._run:
            if self.moment == "publishing" and self.store.journals():
                journals = self.store.journals()
                self._wait(lambda: self.store.journals() != journals, 0.01)
                self._pause(rng.uniform(0.0, 0.05))
            elif self.moment == "anywhere":
                self._pause(rng.uniform(0.0, 1.2 * (pace.start + pace.tail)))
            elif target <= limit and self.before < limit and self.moment != "after the last sample":
                self.moment = "amid the samples"
                self._follow(target)
                self._pause(rng.uniform(0.0, 0.3))
            else:
                self._end(pace, rng)
            self._run.kill()
            self.code = self._run.wait()

    def _end(self, pace: Pace, rng: random.Random) -> None:
        """After the last sample: while scores are written, one cell's files after the other's, or anywhere until the end."""
        scores = self._scores()
        if rng.random() < 0.5:
            self.moment = "replacing scores" if scores else "writing scores"
            self._wait(lambda: self._scores() != scores, 0.002)
            self._pause(rng.uniform(0.0, 0.03))
        else:
            self.moment = "after the last sample"
            self._follow(self._limit)
            self._pause(rng.uniform(0.0, (1.2 if self.before < self._limit else 2) * pace.tail))

    def _scores(self) -> set[tuple[str, int]]:
        """The files of scores, each with its time."""
        found = set()
        for path in (*self.root.glob("samples/*.parquet"), *self.root.glob("metrics/*.parquet")):
            with contextlib.suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_mtime_ns))
        return found

    def _samples(self) -> int:
        return len({sample for _, sample in self.seen})

    def _look(self) -> None:
        """What is stored is known from now on; a row that is another one than before is wrong."""
        rows = self.store.responses(columns=["cell", "sample_id", "committed_at", "worker"]).to_pylist()
        found = {(row["cell"], row["sample_id"]): (row["committed_at"], row["worker"]) for row in rows}
        assert self.seen.items() <= found.items(), "a row that was seen is gone, or another one"
        self.seen = found

    def _follow(self, target: int) -> None:
        """Wait until so many samples are stored."""

        def reached() -> bool:
            self._look()
            return self._samples() >= target

        self._wait(reached, 0.1)

    def _wait(self, reached: Callable[[], bool], every: float) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached() and self._run.poll() is None:
            assert time.monotonic() < deadline, f"nothing moved in {PATIENCE} s"
            time.sleep(every)

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._run.wait(seconds)

    def check(self, cells: int, expected: dict) -> int:
        """What the kill left; how many samples the run added."""
        self._look()
        count = self._samples()
        assert len(self.seen) == cells * count, "a sample has some of its cells only"
        assert setting.in_order(self.root) == list(range(count)), "more than the sample in flight was lost"
        found = setting.answers(self.root)
        assert found == {key: expected["answers"][key] for key in found}, "another answer than the uninterrupted run's"
        return count - self.before

"""`python -m tests.soak`: a sweep of the embedded model, killed again and again while others read its rows (`make soak`).

Round after round one run answers and scores a dataset for several cells into a store of its own. It is shot with SIGKILL at a
random moment (while it starts, while it publishes what the run before it left, amid the samples, while it scores) and
started again by the same command, until it ends. Meanwhile a reader in another process goes through the public door
(`load_rows` with all frames, `make_table`, `status`) without a pause longer than a second, and this process follows the
stored samples every tenth.

Wrong is: a file that cannot be read; a row that somebody has seen and that is gone, or another one, after a kill; a sample of
which only some cells are stored; a sample before the first missing one that is not there, so that more than the sample in
flight was lost; leftovers of a run that ended; rows that are not those of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import json
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store
from tests.run import setting

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 60
COMMAND = ("dataset=pages", "method=[snapkv,random]", "budget=[16,48]", f"limit={SAMPLES}", "model.device=cpu")
MOMENTS = {"amid the samples": 0.7, "publishing": 0.15, "anywhere": 0.15}
PATIENCE = 900  # seconds that a run may take for its next step


# ---------------------------------------------------------------------- the reader
def read(folder: Path) -> None:
    """Read the newest store of a folder until it is told to stop; prints what it met as one line of JSON."""
    from mmkv_bench import load_rows, make_table
    from mmkv_bench.tables.status import status

    met: collections.Counter[str] = collections.Counter()
    most: dict[str, int] = {}

    def polled(root: Path) -> None:
        rows = load_rows(root)
        count = len(rows.responses)
        assert count >= most.get(root.name, 0), f"{count} answers where there were {most[root.name]}"
        most[root.name] = count
        assert len(rows.samples) >= 0 <= len(rows.metrics)
        counted = status(Store(root))
        assert sum(each.rows for each in counted.datasets) >= count
        str(make_table(root))

    while not (folder / "stop").exists():
        stores = sorted(path for path in folder.glob("round*") if path.is_dir())
        met["polls"] += bool(stores)
        for root in stores[-1:]:
            try:
                polled(root)
                met["tables printed"] += 1
            except ConfigError as early:  # no rows yet, or none that is scored
                told = str(early).replace(f"'{root}'", "the store").split(":")[0]
                met["early: " + re.sub(r"\d+", "N", told)] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                met[f"WRONG: {type(error).__name__}: {str(error).replace(str(root), root.name)}"] += 1
        time.sleep(0.5)
    print(json.dumps(met))


# ---------------------------------------------------------------------- the run that is killed
def started(root: Path) -> subprocess.Popen:
    """A run into a store; what it says goes into a file beside the store."""
    words = [sys.executable, "-m", "mmkv_bench", *COMMAND, f"out={root}"]
    with root.with_suffix(".said").open("wb") as said:
        return subprocess.Popen(words, cwd=ROOT, stdout=said, stderr=said)


def ended(root: Path) -> None:
    """A run that nobody stops."""
    assert started(root).wait() == 0, root.with_suffix(".said").read_text()


class Shot:
    """One run and its end. seen: the rows (cell, sample) -> (commit, worker) that were there before and while it ran."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.store, self.seen = root, Store(root), setting.commits(root)
        self.before = len({sample for _, sample in self.seen})
        self.moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        target = self.before + rng.randint(0, 12)
        with started(root) as process:
            self._process = process
            if self.moment == "publishing" and self.store.journals():
                journals = self.store.journals()
                self._wait(lambda: self.store.journals() != journals)
                self._pause(rng.uniform(0.0, 0.05))
            elif self.moment == "amid the samples" and target <= SAMPLES:
                self._wait(lambda: len({sample for _, sample in self.seen}) >= target)
                self._pause(rng.uniform(0.0, 0.3))
            elif self.before == SAMPLES or target > SAMPLES:
                self.moment = "after the last sample"
                self._wait(lambda: len({sample for _, sample in self.seen}) >= SAMPLES)
                self._pause(rng.uniform(0.0, 40.0))
            else:
                self.moment = "anywhere"
                self._pause(rng.uniform(0.0, 20.0))
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            self.code = process.wait()

    def _look(self) -> None:
        """What is stored is known from now on; a row that is another one than before is wrong."""
        rows = self.store.responses(columns=["cell", "sample_id", "committed_at", "worker"]).to_pylist()
        found = {(row["cell"], row["sample_id"]): (row["committed_at"], row["worker"]) for row in rows}
        assert self.seen.items() <= found.items(), "a row that was seen is gone, or another one"
        self.seen = found

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached() and self._process.poll() is None:
            assert time.monotonic() < deadline, f"nothing moved in {PATIENCE} s"
            self._look()
            time.sleep(0.1)

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def check(self, cells: int, expected: dict) -> int:
        """What the kill left; how many samples the run added."""
        self._look()
        samples = {sample for _, sample in self.seen}
        assert len(self.seen) == cells * len(samples), "a sample has some of its cells only"
        assert setting.in_order(self.root) == list(range(len(samples))), "more than the sample in flight was lost"
        found = setting.answers(self.root)
        assert found == {key: expected["answers"][key] for key in found}, "another answer than the uninterrupted run's"
        return len(samples) - self.before


# ---------------------------------------------------------------------- rounds
def soak(folder: Path, kills: int, seed: int, minutes: float) -> dict:
    """Rounds until that many kills, or until the time is over; what was met."""
    rng, begin = random.Random(seed), time.monotonic()
    whole = folder / "uninterrupted"
    ended(whole)
    expected, cells = setting.everything(whole), len(setting.cells(whole))
    met: collections.Counter[str] = collections.Counter()
    moments: collections.Counter[str] = collections.Counter()
    over = False
    while not over:
        root = folder / f"round{met['rounds']:04d}"
        while True:
            over = met["kills"] >= kills or time.monotonic() - begin > 60 * minutes
            if over or met["kills of a round"] >= 16:  # the last run of a round is left alone
                ended(root)
                break
            shot = Shot(root, rng)
            if shot.code != -signal.SIGKILL:
                assert shot.code == 0, root.with_suffix(".said").read_text()
                break
            met["kills"] += 1
            met["kills of a round"] += 1
            moments[shot.moment] += 1
            met["torn lines"] += len(shot.store.journal_damage())
            met["samples by killed runs"] += shot.check(cells, expected)
            told(f"{met['kills']} of {kills} kills, round {met['rounds'] + 1}, {shot.moment}", begin)
        assert setting.everything(root) == expected, "other rows than the uninterrupted run's"
        assert not Store(root).journals() and not list(root.rglob(".*.tmp")), "leftovers of a killed run"
        met["rounds"] += 1
        met["kills of a round"] = 0
        shutil.rmtree(root.with_name(f"round{met['rounds'] - 2:04d}"), ignore_errors=True)
    return {**met, "moments": moments, "cells": cells, "minutes": (time.monotonic() - begin) / 60}


def told(text: str, begin: float) -> None:
    print(f"[{(time.monotonic() - begin) / 60:5.1f} min] {text}", file=sys.stderr, flush=True)


def report(met: dict, reader: dict, seed: int) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mmkv-bench", "pyarrow", "torch"))
    moments = ", ".join(f"{count} {moment}" for moment, count in sorted(met["moments"].items()))
    early = [
        f"- {count} x {text.removeprefix('early: ')}" for text, count in reader.items() if text.startswith("early")
    ]
    wrong = [f"- {count} x {text}" for text, count in reader.items() if text.startswith("WRONG")]
    unread = sum(count for text, count in reader.items() if text.startswith("WRONG"))
    lines = [
        "# Soak",
        "",
        f"Written by `python -m tests.soak --kills {met['kills']} --seed {seed}`: {met['minutes']:.0f} minutes. "
        f"{datetime.datetime.now(datetime.UTC).date()}, {versions}, Python {platform.python_version()}, {platform.machine()}.",
        "",
        f"`mmkv-bench {' '.join(COMMAND)}`: {SAMPLES} samples, {met['cells']} cells.",
        "",
        "| | |",
        "| --- | --- |",
        f"| kills (SIGKILL) | {met['kills']}: {moments} |",
        f"| rounds, each ended and compared with the uninterrupted run | {met['rounds']} |",
        "| rounds with other rows | 0 |",
        f"| samples that killed runs stored | {met['samples by killed runs']} |",
        "| stored samples lost, or stored twice | 0 |",
        "| kills that lost more than the sample in flight | 0 |",
        f"| journals with a torn last line, of that sample | {met['torn lines']} |",
        f"| polls of the reader (load_rows, status, make_table) | {reader.get('polls', 0)} |",
        f"| of them with tables | {reader.get('tables printed', 0)} |",
        f"| of them that met an unreadable file or fewer rows than before | {unread} |",
        "",
        "Polls that read rows and counts, and were told that it is too early for tables:"
        if early
        else "No poll was too early.",
        "",
        *early,
        *wrong,
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many (default: 200, about an hour)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many, however few kills there were")
    parser.add_argument("--write", type=Path, help="also write the Markdown to this file")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.read)
        return 0
    with tempfile.TemporaryDirectory(prefix="mmkv_bench_soak_") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "tests.soak", "--read", name]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                met = soak(folder, given.kills, given.seed, given.minutes)
            finally:
                (folder / "stop").touch()
            assert process.stdout is not None, "it is a pipe"
            reader = json.loads(process.stdout.read())
    text = report(met, reader, given.seed)
    print(text, end="")
    if given.write:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text)
    return int(any("WRONG" in what for what in reader))


if __name__ == "__main__":
    sys.exit(main())

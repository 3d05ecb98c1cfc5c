"""Optional trackers that show a run while it goes on. A tracker is a viewer: the record is the result store alone.

`logger=none` does nothing. `logger=wandb` writes an offline run under `<root>/wandb` (show it later with `wandb sync`);
`mode=online` checks first that the server answers and that a key is configured.

Nobody waits for a tracker: wandb lives in a process of its own (`wandb_process.py`), because it retries for minutes what it
cannot send and keeps a process that imported it from ending. Numbers go there from a thread; those that it cannot take in time
are left out, the end of a run waits `PATIENCE_S` for the rest, and then that process is ended.

Runs of one result folder are one group. A live run's id is the group, its shard and how many attempts came before, so that a
job that is queued again makes no second run of the same id (an offline run cannot be resumed) and the attempts of one job
stand beside each other. The summary of a folder is one run, made of rows (`summary_run.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.store import reachability
from mmkv_bench.store.redaction import redact

log = logging.getLogger(__name__)

MODES = ("offline", "online")
WAITING = 1000
"""Steps that may wait for wandb; further ones are left out."""
PATIENCE_S = 15.0
"""Seconds that the end of a run waits for wandb in all: a job that is preempted has no more than some tens."""
COMMAND = (sys.executable, "-m", "mmkv_bench.store.wandb_process")


class Tracker(Protocol):
    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the run with the resolved configuration (secrets are redacted)."""

    def log(self, values: Mapping[str, float]) -> None:
        """One step of numbers, normally `RunningMeans.add` of a sample's values."""

    def finish(self, failed: bool = False) -> None:
        """Closes the run."""


class RunningMeans:
    """Means over all samples so far, per name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float | None]) -> dict[str, float]:
        """Takes one sample's values in (None: not measured, skipped) and returns the mean of every name seen so far."""
        for name, value in values.items():
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        return {name: total / count for name, (total, count) in self._sums.items()}


def tracker(config: Mapping[str, Any], root: Path | str) -> Tracker:
    """The tracker `config` asks for: `name` (none | wandb), and for wandb `mode`, `project`, `entity`, `group`, `run`,
    `shard` (part of the run's id).

    Raises ConfigError for anything else, and at once, before any work, when mode=online cannot work.
    """
    config = dict(config)
    name = config.pop("name", "none") or "none"
    if name == "none":
        return NoTracker()
    if name != "wandb":
        raise ConfigError(f"logger {name!r} is not known; {nearest(str(name), ('none', 'wandb'))}")
    allowed = ("mode", "project", "entity", "group", "run", "shard")
    for key in config:
        if key not in allowed:
            raise ConfigError(f"logger.{key} is not a setting of the wandb logger; {nearest(str(key), allowed)}")
    return WandbTracker(Path(root), **config)


class NoTracker:
    """Tracks nothing."""

    def start(self, config: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, float]) -> None:
        pass

    def finish(self, failed: bool = False) -> None:
        pass


class WandbTracker:
    """Writes Weights & Biases runs. A wandb that fails is warned about once and ends tracking only; a slow one holds nobody
    up."""

    def __init__(
        self,
        root: Path,
        mode: str = "offline",
        project: str = "mmkv_bench",
        entity: str | None = None,
        group: str | None = None,
        run: str | None = None,
        shard: str = "0of1",
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode!r} is not known; {nearest(str(mode), MODES)}")
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("logger=wandb needs the package wandb; install it or use logger=none")
        if mode == "online":
            reachability.check_online()
        self.folder = root.absolute() / "wandb"
        self.group = group or group_of(root)
        self._given = {"mode": mode, "project": project, "entity": entity, "group": self.group}
        self._name, self._shard = run, shard
        self.patience_s = PATIENCE_S
        self._mail: queue.Queue[str | None] = queue.Queue(WAITING)
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._said: Path | None = None
        self._left_out = 0

    def start(self, config: Mapping[str, Any]) -> None:
        try:
            self.open(attempt(self.folder, f"{self.group}-{self._shard}"), "live", config, self._name)
        except OSError as problem:
            log.warning("wandb cannot start (%s); nothing is tracked, the results go into the store", problem)

    def open(self, name: str, kind: str, config: Mapping[str, Any], shown: str | None = None) -> None:
        """Begin a run of this id; the one before it has been closed.

        kind: wandb's job type; shown: its name, None for the id.
        """
        if self._process is None:
            self._begin()
        self._send(
            {"open": {**self._given, "id": name, "name": shown or name, "job_type": kind}, "config": redact(config)}
        )

    def log(self, values: Mapping[str, float]) -> None:
        self._send({"log": dict(values)})

    def describe(self, summary: Mapping[str, Any], table: Sequence[Mapping[str, Any]] = ()) -> None:
        """The open run's summary, and a table (one mapping per row, with the same keys in each)."""
        columns = list(table[0]) if table else []
        rows = [[row[column] for column in columns] for row in table]
        self._send(
            {"summary": dict(summary), "table": {"columns": columns, "rows": rows} if table else None}, wait=True
        )

    def close(self, failed: bool = False) -> None:
        """End the open run; another one may follow."""
        self._send({"close": int(failed)}, wait=True)

    def finish(self, failed: bool = False) -> None:
        self.ended(failed)

    def ended(self, failed: bool = False) -> bool:
        """End the open run, and wandb. Returns whether all was taken."""
        process, thread = self._process, self._thread
        if process is None or thread is None:
            return False
        until = time.monotonic() + self.patience_s
        self._send({"close": int(failed)}, wait=True)
        with contextlib.suppress(queue.Full):
            self._mail.put(None, timeout=max(until - time.monotonic(), 0.01))
        thread.join(max(until - time.monotonic(), 0))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.01))
        code = process.poll()
        with contextlib.suppress(ProcessLookupError):  # and what wandb started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(queue.Full):
            self._mail.put(None, timeout=1)
        self._process = self._thread = None
        return self._told(code)

    def _told(self, code: int | None) -> bool:
        """Say what went wrong; whether nothing did. code: of its process, None where it had not ended."""
        said = self._said.read_text(errors="replace") if self._said is not None and self._said.exists() else ""
        if code or said:
            log.warning("wandb failed (%s); tracking stopped there, the store has all results", said or f"code {code}")
        elif code is None or self._left_out:
            log.warning(
                "wandb was too slow: its run lacks steps (%d) or its end; the store lacks none; where it is the summary's, the "
                "same command again writes it",
                self._left_out,
            )
        return code == 0 and not said and not self._left_out

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._said = self.folder / ".attempts" / f"{os.getpid()}-{time.time_ns()}.failed"
        self._said.parent.mkdir(exist_ok=True)
        self._mail = queue.Queue(WAITING)
        self._process = subprocess.Popen(
            [*COMMAND, str(self.folder), str(self._said), str(self.patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run, which tells it of its end
        )
        self._thread = threading.Thread(target=self._work, args=(self._process,), name="wandb", daemon=True)
        self._thread.start()

    def _send(self, message: Mapping[str, Any], wait: bool = False) -> None:
        """wait: for a place in the queue, unless wandb was too slow already."""
        if self._process is None:
            return
        wait = wait and not self._left_out
        try:
            self._mail.put(json.dumps(message, default=str), block=wait, timeout=self.patience_s if wait else None)
        except queue.Full:
            self._left_out += 1

    def _work(self, process: subprocess.Popen[str]) -> None:
        """In a thread of its own: hands messages over. Where nobody takes them any more they are dropped."""
        assert process.stdin is not None
        broken = False
        while (message := self._mail.get()) is not None:
            if not broken:
                try:
                    process.stdin.write(f"{message}\n")
                    process.stdin.flush()
                except OSError:
                    broken = True
        with contextlib.suppress(OSError):
            process.stdin.close()


def group_of(root: Path) -> str:
    """The group of a result folder's runs: its name, and a digest of where it is."""
    place = str(root.absolute())
    return (
        f"{re.sub(r'[^A-Za-z0-9_-]+', '-', root.absolute().name)[:40]}-{hashlib.sha256(place.encode()).hexdigest()[:6]}"
    )


def attempt(folder: Path, name: str) -> str:
    """`name` with the first number that no run of this folder has taken; any number of processes may ask at once."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    taken = folder / ".attempts"
    taken.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (taken / f"{name}-{number}").mkdir()
        except FileExistsError:
            number += 1
            continue
        return f"{name}-{number}"

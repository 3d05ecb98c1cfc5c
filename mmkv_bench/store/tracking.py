"""Optional trackers that show a run while it goes on. A tracker is a viewer: the record is the result store alone.

`logger=none` does nothing. `logger=wandb` writes an offline run under `<root>/wandb` (show it later with `wandb sync`);
`mode=online` checks first that the server answers and that a key is configured.

Nobody waits for a tracker: wandb lives in a process of its own (`wandb_process.py`), because it retries for minutes what it
cannot send and keeps a process that imported it from ending. Numbers go there from a thread; those that it cannot take in
time are left out, the end of a run waits `PATIENCE_S` for the rest, and then that process is ended.

Runs of one result folder are one group. A live run's id is the group, its shard and how many attempts came before, so that
a job that is queued again makes no second run of the same id (an offline run cannot be resumed) and the attempts of one job
stand beside each other. The summary of a folder is one run, made of rows (`show_summary`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import netrc
import os
import queue
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from mmkv_bench.errors import ConfigError
from mmkv_bench.store.cell_rows import redact
from mmkv_bench.store.files import lock_held
from mmkv_bench.store.wandb_process import begin_anew

_OFFLINE = "Use logger.mode=offline and run `wandb sync <folder>` later from a machine with network."


def check_online(timeout_s: float = 3.0) -> None:
    """Raises ConfigError, after at most about `timeout_s`, when the server does not answer or no API key is configured.

    The server is WANDB_BASE_URL or api.wandb.ai. Behind a proxy (HTTPS_PROXY, or HTTP_PROXY for a plain http server)
    only the proxy could tell, so only the key is checked.
    """
    url = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"WANDB_BASE_URL is {url.geturl()!r}; it must look like https://api.wandb.ai")
    if not _has_key(url.netloc):
        raise ConfigError(
            f"logger.mode=online needs an API key for {url.hostname}: run `wandb login` or set WANDB_API_KEY. {_OFFLINE}"
        )
    proxy = f"{url.scheme}_proxy"
    if os.environ.get(proxy) or os.environ.get(proxy.upper()):
        return
    problems: list[Exception] = []
    # In a thread, because no socket timeout bounds name resolution; a daemon, so that it never holds the process.
    thread = threading.Thread(target=_ask, args=(url.geturl(), timeout_s, problems), daemon=True)
    thread.start()
    thread.join(timeout_s + 0.5)
    problem = problems[0] if problems else f"no answer in {timeout_s:g} s" if thread.is_alive() else None
    if problem is not None:
        raise ConfigError(f"logger.mode=online but {url.hostname} cannot be reached ({problem}). {_OFFLINE}")


def _ask(url: str, timeout_s: float, problems: list[Exception]) -> None:
    """Send a request and keep what went wrong. Any HTTP answer will do; a server that accepts connections and stays silent makes
    wandb hang just as well."""
    unverified = ssl.create_default_context()  # nothing is sent, and wandb itself checks certificates by its own rules
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        with urlopen(Request(url, method="HEAD"), timeout=timeout_s, context=unverified):  # noqa: S310 - check_online lets http and https through
            pass
    except HTTPError:
        pass
    except (OSError, HTTPException) as problem:
        problems.append(problem)


def _has_key(netloc: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False


log = logging.getLogger(__name__)

WAITING = 1000
"""Steps that may wait for wandb; further ones are left out."""
PATIENCE_S = 15.0
"""Seconds that the end of a run waits for wandb in all: a job that is preempted has no more than some tens."""
COMMAND = (sys.executable, "-m", "mmkv_bench.store.wandb_process")


class Tracker:
    """A viewer of one run."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run with the resolved configuration (secrets are redacted)."""

    def log(self, values: Mapping[str, float]) -> None:
        """Show one step of numbers, normally `RunningMeans.add` of a sample's values."""

    def finish(self, failed: bool = False) -> None:
        """Close the run."""


class NoTracker(Tracker):
    """Tracks nothing."""


class RunningMeans:
    """Means over all samples so far, per name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float | None]) -> dict[str, float]:
        """Add one sample's values (None: not measured, skipped) and return the mean of every name so far."""
        for name, value in values.items():
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        return {name: total / count for name, (total, count) in self._sums.items()}


def tracker(config: Mapping[str, Any], root: Path | str) -> Tracker:
    """The tracker of a configuration: `name` (none | wandb), and for wandb the keywords of `WandbTracker`.

    Raises:
        ConfigError: wandb is not installed, or mode=online cannot work; before any work.
    """
    given = dict(config)
    return NoTracker() if given.pop("name", "none") == "none" else WandbTracker(Path(root), **given)


class WandbTracker(Tracker):
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
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("logger=wandb needs the package wandb; install it or use logger=none")
        if mode == "online":
            check_online()
        self.folder = root.absolute() / "wandb"
        self.group = group or group_of(root)
        self._given = {"mode": mode, "project": project, "entity": entity, "group": self.group}
        self._name, self._shard = run, shard
        self.patience_s = PATIENCE_S
        self._mail: queue.Queue[str | None] = queue.Queue(WAITING)
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._report: Path | None = None
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
        return self._all_sent(code)

    def _all_sent(self, code: int | None) -> bool:
        """Warn of what went wrong; True where nothing did. code: of wandb's process, None where it had not ended."""
        fault = self._report.read_text(errors="replace") if self._report is not None and self._report.exists() else ""
        if code or fault:
            log.warning("wandb failed (%s); tracking stopped there, the store has all results", fault or f"code {code}")
        elif code is None or self._left_out:
            log.warning(
                "wandb was too slow: its run lacks %d steps or its end. The store has all results; if this was the summary, the "
                "same command again writes it",
                self._left_out,
            )
        return code == 0 and not fault and not self._left_out

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._report = self.folder / ".attempts" / f"{os.getpid()}-{time.time_ns()}.failed"
        self._report.parent.mkdir(exist_ok=True)
        self._mail = queue.Queue(WAITING)
        self._process = subprocess.Popen(
            [*COMMAND, str(self.folder), str(self._report), str(self.patience_s)],
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
        """Hand messages over, in a thread of its own. Where nobody takes them any more they are dropped."""
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


MEASURED = (
    "score",
    "low",
    "high",
    "difference",
    "answers",
    "failures",
    "ttft_s",
    "tpot_s",
    "peak_bytes",
    "group_prefill_s",
    "group_decode_s",
    "group_peak_bytes",
)
"""Keys of a cell's row that are numbers it came to; all others say what it is."""


def show_summary(
    config: Mapping[str, Any],
    root: Path | str,
    about: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    each: bool = False,
) -> bool:
    """Show the results of all rows of a folder in one run.

    It is written once: where the same was shown before nothing is done, and other numbers replace it under the same id.

    Args:
        config: as for `tracker`; root: the folder; about: the run's configuration; cells: a row per cell and metric, keys that
            are the same in each; each: one more run for each row, with its description as configuration and its
            numbers as summary.

    Returns:
        Whether it was written now.

    Raises:
        ConfigError: as `tracker`.
    """
    shown = tracker(config, root)
    if not isinstance(shown, WandbTracker) or not cells:
        return False
    try:
        return _show(shown, about, cells, each)
    except OSError as problem:
        log.warning("wandb's summary cannot be written (%s); the results are all in the store", problem)
        return False


def _show(shown: WandbTracker, about: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], each: bool) -> bool:
    """Write the summary under a lock; False where the same was written before."""
    digest = hashlib.sha256(json.dumps([about, cells, each], sort_keys=True, default=str).encode()).hexdigest()[:16]
    marks = shown.folder / ".attempts"
    marks.mkdir(parents=True, exist_ok=True)
    mark, lock = marks / f"{shown.group}-summary", marks / "lock"
    lock.touch()
    with lock_held(lock):
        if mark.exists() and mark.read_text() == digest:
            return False
        mark.unlink(missing_ok=True)
        shown.patience_s += len(cells) if each else 0
        begin_anew(shown.folder, name := f"{shown.group}-summary")
        shown.open(name, "summary", about)
        shown.describe({"cells": len({row["cell"] for row in cells})}, cells)
        for row in cells if each else ():
            shown.close()
            begin_anew(shown.folder, name := f"{shown.group}-{_of_row(row)}")
            shown.open(name, "cell", {key: row[key] for key in row if key not in MEASURED}, _label(row))
            shown.describe({key: row[key] for key in MEASURED if row[key] is not None})
        written = shown.ended()
        if written:  # else the next run tries again
            mark.write_text(digest)
    return written


def _of_row(row: Mapping[str, Any]) -> str:
    """Name of a cell's run: the cell, its metric and the shape of its prompts."""
    return "-".join(str(row[key]) for key in ("cell", "metric", "prompt_tokens", "batch") if row[key] is not None)


def _label(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("method", "budget", "dataset", "metric") if row[key] is not None)

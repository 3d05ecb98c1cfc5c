"""Optional trackers, which show a run while it works. Results are recorded in the result store alone.

`logger=none` does nothing. `logger=wandb` writes an offline run under `<root>/wandb` (show it later with `wandb sync`).
`mode=online` first checks that the server answers and that a key is configured.

A run never waits for a tracker. wandb runs in a separate process, because it retries failed uploads for minutes and
keeps a process that imported it from ending. A thread sends the numbers to that process through a pipe. At its end the
run waits `PATIENCE_S` for the process, then kills it. If the run is killed, the pipe ends and the process marks its
runs as failed.

Runs of one result folder form one group. A live run's id is the group, the shard and the attempt number, so a job that
is queued again starts another run (an offline run cannot be resumed). The summary of a folder is one run made from rows
(`show_summary`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import netrc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any
from urllib.parse import urlsplit

from mmkv_bench.errors import ConfigError
from mmkv_bench.store.files import checksum, lock_held
from mmkv_bench.store.rows import redact

log = logging.getLogger(__name__)

PATIENCE_S = 15.0
"""Total seconds that the end of a run waits for wandb. A preempted job has only some tens of seconds."""
_OFFLINE = "Use logger.mode=offline and run `wandb sync <folder>` later from a machine with network."
_SETTINGS = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,  # host, user, command line, paths
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "host": "",
    "init_timeout": 20,
}


class RunningMeans:
    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float | None]) -> dict[str, float]:
        """Add the values of one sample by name (None is skipped). Return the mean of every name so far."""
        for name, value in values.items():
            if value is not None:
                sum_so_far, values_so_far = self._sums.get(name, (0.0, 0))
                self._sums[name] = (sum_so_far + value, values_so_far + 1)
        return {name: sum_so_far / values_so_far for name, (sum_so_far, values_so_far) in self._sums.items()}


class WandbTracker:
    """A tracker that writes Weights & Biases runs. If wandb fails, a warning is logged and tracking ends.

    Raises:
        ConfigError: wandb is not installed, or mode=online cannot work.
    """

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
        self._settings = {"mode": mode, "project": project, "entity": entity, "group": self.group}
        self._name, self._shard = run, shard
        self.patience_s = PATIENCE_S
        self._messages: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._process: subprocess.Popen[str] | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Open this process's wandb run. config: the resolved configuration, whose secrets are redacted."""
        try:
            self.open(attempt(self.folder, f"{self.group}-{self._shard}"), "live", config, self._name)
        except OSError as problem:
            log.warning("wandb cannot start (%s); nothing is tracked, but the results go into the store", problem)

    def log(self, values: Mapping[str, float]) -> None:
        """Send the named values of one step to wandb, such as the result of `RunningMeans.add`."""
        self.send({"log": dict(values)})

    def open(self, name: str, kind: str, config: Mapping[str, Any], shown: str | None = None) -> None:
        """Open a wandb run whose id is `name`. The previous run must be closed.

        kind: wandb's job type.
        shown: the run's name; None uses the id.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mmkv_bench.store.tracking", str(self.folder), str(self.patience_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only the run, which ends this process itself
            )
            self._messages = SimpleQueue()
            threading.Thread(target=_feed, args=(self._process.stdin, self._messages), daemon=True).start()
        settings = self._settings | {"id": name, "name": shown or name, "job_type": kind}
        self.send({"open": settings, "config": redact(config)})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the wandb process, without waiting."""
        if self._process is not None:
            self._messages.put(message)

    def finish(self, failed: bool = False) -> bool:
        """End the open run and the wandb process, and log faults. Return True if a process was open without fault."""
        process = self._process
        if process is None:
            return False
        self._messages.put({"close": int(failed)})
        self._messages.put(None)
        exit_code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(self.patience_s)
        with contextlib.suppress(ProcessLookupError):  # and the processes that wandb started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        fault = process.stdout.read() if process.stdout is not None else ""
        self._process = None
        if exit_code is None:
            log.warning(
                "wandb was too slow and was stopped. The store has all results; the same command writes a summary"
            )
        elif exit_code or fault:
            log.warning(
                "wandb failed (%s); tracking has stopped, but the store has all results", fault or f"code {exit_code}"
            )
        return exit_code == 0 and not fault


def _feed(stream: IO[str], messages: SimpleQueue[Mapping[str, Any] | None]) -> None:
    """Write each message of a queue as a line into a pipe, until the queue yields None."""
    with contextlib.suppress(OSError), stream:  # the process at the other end reports why it ended
        for message in iter(messages.get, None):
            stream.write(json.dumps(message, default=str) + "\n")
            stream.flush()


def group_of(root: Path) -> str:
    """Return the group of a result folder's runs: the folder's name and a digest of its path."""
    absolute_root = root.absolute()
    return f"{_plain(absolute_root.name)[:40]}-{checksum(str(absolute_root).encode())[:6]}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def attempt(folder: Path, name: str) -> str:
    """Return `name` with the lowest number that no wandb run of the folder has used. Safe for concurrent processes."""
    attempts_folder = folder / ".attempts"
    attempts_folder.mkdir(parents=True, exist_ok=True)
    attempt_number = 1
    while True:
        try:
            (attempts_folder / f"{_plain(name)}-{attempt_number}").mkdir()
        except FileExistsError:
            attempt_number += 1
            continue
        return f"{_plain(name)}-{attempt_number}"


MEASURED = (
    *("score", "low", "high", "difference", "answers", "failures", "ttft_s", "tpot_s", "peak_bytes"),
    *("group_prefill_s", "group_decode_s", "group_peak_bytes"),
)
"""Keys of a cell's row that are results. All other keys describe the cell."""


def show_summary(
    shown: WandbTracker, about: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], each: bool = False
) -> bool:
    """Show the results of all rows in a tracker's folder as one wandb run. Return whether a summary was written now.

    Equal results are shown once. Other results replace the earlier ones under the same id.

    Args:
        shown: the tracker.
        about: the run's configuration.
        cells: a row per cell and metric, all with the same keys.
        each: also write one wandb run per row, with the cell's description as its configuration and its results as its
            summary.
    """
    if not cells:
        return False
    digest = checksum(json.dumps([about, cells, each], sort_keys=True, default=str).encode())
    marks_folder = shown.folder / ".attempts"
    mark_file, lock_file = marks_folder / f"{shown.group}-summary", marks_folder / "lock"
    try:
        marks_folder.mkdir(parents=True, exist_ok=True)
        lock_file.touch()
        with lock_held(lock_file):
            if mark_file.exists() and mark_file.read_text() == digest:
                return False
            mark_file.unlink(missing_ok=True)
            shown.patience_s += len(cells) if each else 0
            shown.open(mark_file.name, "summary", about)
            rows = [list(row.values()) for row in cells]
            number_of_cells = len({row["cell"] for row in cells})
            shown.send({"summary": {"cells": number_of_cells}, "table": {"columns": list(cells[0]), "data": rows}})
            for row in cells if each else ():
                shown.send({"close": 0})
                cell_labels = [row[key] for key in ("cell", "metric", "prompt_tokens", "batch") if row[key] is not None]
                labels = [row[key] for key in ("method", "budget", "dataset", "metric") if row[key] is not None]
                description = {key: row[key] for key in row if key not in MEASURED}
                name = "-".join(map(str, (shown.group, *cell_labels)))
                shown.open(name, "cell", description, " ".join(map(str, labels)))
                shown.send({"summary": {key: row[key] for key in MEASURED if row[key] is not None}})
            if written := shown.finish():  # else the next run tries again
                mark_file.write_text(digest)
            return written
    except OSError as problem:
        log.warning("wandb's summary cannot be written (%s), but all results are in the store", problem)
        return False


def check_online(timeout_s: float = 3.0) -> None:
    """Raise ConfigError if the server does not answer in about `timeout_s`, or no API key is configured.

    The server is WANDB_BASE_URL or api.wandb.ai. Behind a proxy only the key is checked.
    """
    import requests

    url = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"WANDB_BASE_URL is {url.geturl()!r}; it must look like https://api.wandb.ai")
    if not _has_key(url.netloc):
        raise ConfigError(
            f"logger.mode=online needs an API key for {url.hostname}: run `wandb login` or set WANDB_API_KEY. {_OFFLINE}"
        )
    if requests.utils.get_environ_proxies(url.geturl()):
        return
    try:  # any answer counts; a server that accepts connections but stays silent would make wandb hang
        requests.head(url.geturl(), timeout=timeout_s)
    except requests.exceptions.SSLError:
        pass  # wandb checks certificates by other rules
    except requests.RequestException as problem:
        reason = type(problem).__name__
        raise ConfigError(f"logger.mode=online but {url.hostname} cannot be reached ({reason}). {_OFFLINE}") from None


def _has_key(netloc: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# The process


def _show(messages: Iterable[dict[str, Any]], folder: Path) -> None:
    """Apply messages (of `WandbTracker.send`) to wandb. A run that is open after the last one is marked as failed."""
    import wandb

    run: Any = None
    for message in messages:
        if "open" in message:
            settings = message["open"]
            for old in folder.glob(f"offline-run-*-{settings['id']}"):  # `wandb sync` then sends one run of this id
                if not next(old.glob("*.synced"), None):
                    shutil.rmtree(old, ignore_errors=True)
            if settings["mode"] == "online":
                settings["resume"] = "allow"
            quiet_settings = wandb.Settings(**_SETTINGS)
            run = wandb.init(
                dir=str(folder.parent),
                config=message["config"],
                settings=quiet_settings,
                reinit="create_new",
                **settings,
            )
        elif "log" in message:
            run.log(message["log"])
        elif "summary" in message:
            run.summary.update(message["summary"])
            if "table" in message:
                run.log({"results": wandb.Table(**message["table"])})
        else:
            run.finish(exit_code=message["close"])
            run = None
    if run is not None:
        run.finish(exit_code=1)


def main(folder: str, patience_s: str) -> None:
    """Run the wandb process: apply messages from stdin until it is closed, then print what went wrong.

    The process ignores the signals that stop jobs, because the run ends it. `patience_s` seconds after stdin was
    closed, it kills itself and its children. It exits by `os._exit`, because otherwise wandb would wait for its own
    process.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # wandb takes these three folders only from the environment. A user's own values are kept.
    for variable, name in (("DATA", ".data"), ("CACHE", ".cache"), ("CONFIG", ".config")):
        os.environ.setdefault(f"WANDB_{variable}_DIR", str(Path(folder) / name))
    stdin, stdout, null_device = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # not inherited, because processes started by wandb would keep the pipes open
        os.dup2(null_device, stream)
    messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def read() -> None:
        with os.fdopen(stdin, encoding="utf-8") as lines, contextlib.suppress(ValueError):  # a run killed within a line
            for line in lines:
                messages.put(json.loads(line))
        messages.put(None)
        time.sleep(float(patience_s))
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    exit_code = 0
    try:
        _show(iter(messages.get, None), Path(folder))
        import wandb

        wandb.teardown()
    except BaseException as problem:  # noqa: BLE001 - whatever wandb raises; a tracker's failure is only reported
        os.write(stdout, f"{type(problem).__name__}: {problem}".replace("\n", " ")[:500].encode())
        exit_code = 1
    os._exit(exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])

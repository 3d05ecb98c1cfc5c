"""wandb in a process of its own: takes messages from stdin, a JSON document a line, until it is closed.

    python -m mmkv_bench.store.wandb_process <folder> <file for what went wrong> <seconds after the end>

It cannot hold up the run that started it: it ignores the signals that stop jobs, since the run tells it of its end, and
some seconds after stdin was closed it ends whatever wandb is still doing.

wandb writes an offline run's file when 32 KiB are full or the run ends (0.25, which lmms-eval pins), so a kill leaves an
empty one. Messages of an open offline run are therefore kept in a file beside it, and the next process in the folder writes
a killed run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_QUIET = {
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


class Viewer:
    """Does messages with wandb."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._wandb, self._folder = wandb, folder
        self._run: Any = None

    def do(self, message: dict[str, Any]) -> None:
        """Do one message: begin a run, log a step, describe the open run, or end it."""
        if "open" in message:
            self._open(message["open"], message["config"])
        elif "log" in message:
            self._run.log(message["log"])
        elif "summary" in message:
            self._run.summary.update(message["summary"])
            if (table := message["table"]) is not None:
                self._run.log({"results": self._wandb.Table(columns=table["columns"], data=table["rows"])})
        else:
            self.close(message["close"])

    def _open(self, given: dict[str, Any], config: dict[str, Any]) -> None:
        again = {"resume": "allow"} if given["mode"] == "online" else {}
        settings = self._wandb.Settings(**_QUIET)
        self._run = self._wandb.init(
            dir=str(self._folder.parent), config=config, settings=settings, reinit="create_new", **given, **again
        )

    def close(self, code: int) -> None:
        """End the open run."""
        if self._run is not None:
            self._run.finish(exit_code=code)
        self._run = None

    def end(self) -> None:
        """Wait until wandb has written all."""
        self._wandb.teardown()


class MessageLog:
    """Messages of the open run, in `.kept/<id>` until it is closed. Its writer holds a lock, so that a file without one is of a
    killed run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / ".kept"
        self._stream: Any = None

    def add(self, message: dict[str, Any]) -> None:
        """Keep one, before it goes to wandb."""
        opened = message.get("open", {})
        if opened.get("mode") == "offline" and opened["job_type"] == "live":  # a summary is made of rows again
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stream = open(self._folder / opened["id"], "w", encoding="utf-8")  # noqa: SIM115 - until closed
            with contextlib.suppress(OSError):  # no locks here: nothing is written again
                fcntl.flock(self._stream, fcntl.LOCK_EX)
        if self._stream is not None:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()

    def forget(self) -> None:
        """The run is closed: wandb has it."""
        if self._stream is not None:
            Path(self._stream.name).unlink(missing_ok=True)
            self._stream.close()
        self._stream = None

    def killed(self) -> Iterable[list[dict[str, Any]]]:
        """Messages of each killed run; its file is taken away behind it."""
        for path in sorted(self._folder.glob("*")):
            with contextlib.suppress(OSError, ValueError), open(path, "r+", encoding="utf-8") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                messages = [json.loads(line) for line in stream if line.endswith("\n")]  # else it was being written
                if messages and os.fstat(stream.fileno()).st_nlink:  # empty: of a writer that is about to lock it
                    try:
                        yield messages
                    finally:  # also where wandb does not take them: a further run would fail at them again
                        path.unlink()


def begin_anew(folder: Path, name: str) -> None:
    """Remove an earlier run of this id that nobody has sent yet: `wandb sync` then sends one."""
    for old in folder.glob(f"offline-run-*-{name}"):
        if not next(old.glob("*.synced"), None):
            shutil.rmtree(old, ignore_errors=True)


def work(lines: Iterable[str], folder: Path) -> None:
    """Write killed runs again, then do what lines say; a run that is open at their end failed."""
    viewer, log = Viewer(folder), MessageLog(folder)
    for messages in log.killed():
        begin_anew(folder, messages[0]["open"]["id"])
        for message in messages:
            viewer.do(message)
        viewer.close(1)
    for message in map(json.loads, lines):
        log.add(message)
        viewer.do(message)
        if "close" in message:
            log.forget()
    viewer.close(1)
    log.forget()
    viewer.end()


def main(folder: str, failed: str, patience_s: str) -> None:
    """The process. Leaves by `os._exit`: wandb would wait for its own at a normal end."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # wandb takes these three folders from the environment only; a user's own choice stands.
    for variable, name in (("DATA", ".data"), ("CACHE", ".cache"), ("CONFIG", ".config")):
        os.environ.setdefault(f"WANDB_{variable}_DIR", str(Path(folder) / name))
    lines = os.fdopen(os.dup(0))  # not inherited: what wandb starts would keep the pipe open
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def until_closed() -> Any:
        yield from lines
        end = threading.Timer(float(patience_s), os.killpg, (os.getpgrp(), signal.SIGKILL))
        end.daemon = True
        end.start()

    code = 0
    try:
        work(until_closed(), Path(folder))
    except BaseException as problem:  # noqa: BLE001 - whatever wandb raises; a viewer's failure is told and no more
        Path(failed).write_text(f"{type(problem).__name__}: {problem}".replace("\n", " ")[:500])
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""wandb in a process of its own: takes messages from stdin, a JSON document a line, until it is closed.

    python -m mmkv_bench.store.wandb_process <folder> <file for what went wrong> <seconds after the end>

It cannot hold up the run that started it: it ignores the signals that stop jobs, since the run tells it of its end, and some
seconds after stdin was closed it ends whatever wandb is still doing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
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
    """Does what messages say, with wandb."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._wandb, self._folder = wandb, folder
        self._run: Any = None

    def open(self, given: dict[str, Any], config: dict[str, Any]) -> None:
        """Begin a run."""
        again = {"resume": "allow"} if given["mode"] == "online" else {}
        settings = self._wandb.Settings(**_QUIET)
        self._run = self._wandb.init(
            dir=str(self._folder.parent), config=config, settings=settings, reinit="create_new", **given, **again
        )

    def log(self, values: dict[str, float]) -> None:
        """A step of the open run."""
        self._run.log(values)

    def describe(self, summary: dict[str, Any], table: dict[str, Any] | None) -> None:
        """The open run's summary, and its table."""
        self._run.summary.update(summary)
        if table is not None:
            self._run.log({"results": self._wandb.Table(columns=table["columns"], data=table["rows"])})

    def close(self, code: int) -> None:
        """End the open run."""
        if self._run is not None:
            self._run.finish(exit_code=code)
        self._run = None

    def end(self) -> None:
        """Wait for what wandb still writes."""
        self._wandb.teardown()


def work(lines: Any, folder: Path) -> None:
    """Do what lines say; a run that is open at their end failed."""
    viewer = Viewer(folder)
    for line in lines:
        message = json.loads(line)
        if "open" in message:
            viewer.open(message["open"], message["config"])
        elif "log" in message:
            viewer.log(message["log"])
        elif "summary" in message:
            viewer.describe(message["summary"], message["table"])
        else:
            viewer.close(message["close"])
    viewer.close(1)
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

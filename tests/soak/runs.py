"""Starting the command that is soaked: as a process, and as a fork of one that has imported the libraries (`warm.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("dataset=pages", "method=[snapkv,random]", "budget=[16,48]", "model.device=cpu")


class Run(Protocol):
    """What a run is asked, as of subprocess.Popen."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Forked:
    """A run in a fork of the server, whose pipes are not buffered."""

    def __init__(self, server: subprocess.Popen[bytes], argv: list[str], said: Path) -> None:
        assert server.stdin is not None and server.stdout is not None, "they are pipes"
        self._from = server.stdout
        self._code: int | None = None
        server.stdin.write(json.dumps({"argv": argv, "cwd": str(ROOT), "said": str(said)}).encode() + b"\n")
        self._process = int(self._from.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._from], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked run", timeout or 0)
            self._code = int(self._from.readline())
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)


class Starter:
    """Runs into a store, dead at the end of their block; what one says goes into a file beside the store."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server

    @contextlib.contextmanager
    def running(self, root: Path, limit: int, forked: bool = False) -> Iterator[Run]:
        argv, told = [*COMMAND, f"limit={limit}", f"out={root}"], _said(root)
        with told.open("wb") as file:
            words = [sys.executable, "-m", "mmkv_bench", *argv]
            run: Run = (
                Forked(self._server, argv, told)
                if forked
                else subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
            )
        try:
            yield run
        finally:
            run.kill()
            run.wait()

    def ended(self, root: Path, limit: int) -> None:
        """A run that nobody stops."""
        with self.running(root, limit) as run:
            assert run.wait() == 0, said(root)


@contextlib.contextmanager
def starter() -> Iterator[Starter]:
    """With a server of its own."""
    words = [sys.executable, str(Path(__file__).with_name("warm.py"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True) as server:
        try:
            yield Starter(server)
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def said(root: Path) -> str:
    """What the last run into a store said."""
    return _said(root).read_text()


def _said(root: Path) -> Path:
    return root.with_suffix(".said")

"""The files that a piece of code opens, reported by the interpreter (audit event `open`, PEP 578).

A task's code finds its pictures in ways of its own, so nothing else names them all. What is read by programs that it
starts, over the network, or from a list of a folder's files cannot be looked at again: then the files are not `traceable`.
Readers written in C that open files by themselves (video decoders, cv2) are not heard: see `task_code`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mmkv_bench.file_state import State

CODE = (".py", ".pyc", ".so")  # imported on the way; the versions of packages stand for it
_UNTRACEABLE = {
    "os.listdir",
    "os.scandir",
    "glob.glob",
    "subprocess.Popen",
    "os.system",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
}
_MADE_UP = ("/proc/", "/sys/", "/dev/")  # the kernel makes these up; they have no size
_listeners: list[OpenedFiles] = []
_hooked = False


class OpenedFiles:
    """Files that were opened for reading: path -> state before that, None where there was no file.

    `traceable`: whether every path says where its file lies (a relative one depends on the working folder), and nothing but files
    was read.
    """

    def __init__(self) -> None:
        self.files: dict[str, State | None] = {}
        self.traceable = True

    def hear(self, path: object, flags: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open descriptor, whose own opening was heard
        name = os.fsdecode(path)
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes or name in self.files or name.endswith(CODE):
            return
        self.traceable &= os.path.isabs(name)
        try:
            status = os.stat(name)
        except OSError:
            self.files[name] = None
            return
        if stat.S_ISREG(status.st_mode) and not name.startswith(_MADE_UP):
            self.files[name] = State.of(status)


@contextmanager
def opened() -> Iterator[OpenedFiles]:
    """Listen while the block runs, in all threads."""
    global _hooked  # noqa: PLW0603 - the interpreter takes a hook once and for all
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked = True
    files = OpenedFiles()
    _listeners.append(files)
    try:
        yield files
    finally:
        _listeners.remove(files)


def _hear(event: str, arguments: tuple) -> None:
    if event == "open" and _listeners:
        path, _, flags = arguments
        for listener in _listeners:
            listener.hear(path, flags)
    elif event in _UNTRACEABLE and _listeners and not _importing():
        for listener in _listeners:
            listener.traceable = False


def _importing() -> bool:
    """True where the interpreter itself lists a folder, to find a module in it. Called by `_hear`."""
    return sys._getframe(2).f_code.co_filename.startswith("<frozen importlib")

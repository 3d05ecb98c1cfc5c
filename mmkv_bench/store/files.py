"""Files that appear whole or not at all, and what to tell a person when the disk refuses."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mmkv_bench.errors import ConfigError, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def sync_folder(folder: Path) -> None:
    """Makes renames and removals inside `folder` survive a power failure."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Staged:
    """A file written and synced under a hidden name; `place` gives it its name in one step, `drop` forgets it.

    The hidden name starts with a dot and ends in .tmp, so dataset readers never take it for a part.
    """

    def __init__(self, final: Path, write: Callable[[BinaryIO], None]) -> None:
        self.final = final
        self._hidden: Path | None = final.parent / f".{final.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self._hidden, "xb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            self.drop()
            raise

    def place(self) -> None:
        os.replace(self._hidden, self.final)
        self._hidden = None
        sync_folder(self.final.parent)

    def drop(self) -> None:
        if self._hidden is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._hidden)
            self._hidden = None


def write_whole(final: Path, write: Callable[[BinaryIO], None]) -> None:
    """Writes `final` so that readers see the old content or the new one, also after a crash. Raises OSError."""
    staged = Staged(final, write)
    try:
        staged.place()
    finally:
        staged.drop()


def remove_stale(folder: Path, older_than_s: float = 86_400.0) -> None:
    """Removes hidden leftovers of killed writers. A day: no writer keeps one for longer than seconds."""
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()


@contextmanager
def disk_errors(doing: str, root: Path) -> Iterator[None]:
    """Turns an OSError inside the block into a StoreError that says what to do."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if problem.errno in _FULL:
            remedy = "Free space (or raise the quota or file size limit)"
        elif problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "Make the folder writable for this user"
        else:
            remedy = "Check the disk or file system"
        raise StoreError(
            f"{doing} failed under {root}: {reason}. Nothing was left half-written. {remedy} and run the same command "
            "again: it continues at the first missing sample."
        ) from problem


def check_folder(folder: Path, need_bytes: int) -> None:
    """Raises ConfigError unless files can be made in `folder`, which may not exist yet, with `need_bytes` to spare.

    Creates nothing that stays.
    """
    ancestor = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    remedy = "Choose another result folder"
    if not ancestor.is_dir():
        raise ConfigError(f"result folder {folder}: {ancestor} is not a folder. {remedy}, or move that file away.")
    try:
        with tempfile.TemporaryFile(dir=ancestor) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(ancestor).free
    except OSError as problem:
        raise ConfigError(
            f"result folder {folder}: cannot write in {ancestor} ({problem.strerror or problem}). {remedy}, "
            "or make this one writable."
        ) from problem
    if free < need_bytes:
        raise ConfigError(
            f"result folder {folder}: {free / 2**20:.0f} MiB free, at least {need_bytes / 2**20:.0f} MiB are needed. "
            f"{remedy}, or free some space."
        )

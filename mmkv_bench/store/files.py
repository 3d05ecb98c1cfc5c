"""Files that appear whole or not at all, short checksums, and the error a user gets when the disk refuses."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from mmkv_bench.errors import ConfigError, StoreError

MARK = "store.json"
"""The file that makes a folder a store."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""What flock says on a file system without it: nobody can tell a dead writer from a live one there."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal text.

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def checksum(data: bytes) -> str:
    """First 16 hex digits of the sha256."""
    return hashlib.sha256(data).hexdigest()[:16]


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside `folder` survive a power failure."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def locked(file: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to take the flock of an open file: True where this process holds it now, None where there are no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno in NO_LOCKS:
            return None
        raise
    return True


@contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """Wait for the exclusive flock of a file and hold it; where the file system has no locks, nobody waits."""
    file = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as problem:
            if problem.errno not in NO_LOCKS:
                raise
        yield
    finally:
        # Not by closing alone: a process that was forked meanwhile has the file open too.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def new_locked(hidden: Path) -> int:
    """A new, empty, locked file: its descriptor, open for reading and appending. Raises OSError.

    The lock tells `remove_stale` that somebody lives who will name the file. It can look between creation and lock and
    remove the file: then another is made.
    """
    for _ in range(100):
        file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if locked(file) is not False and os.fstat(file).st_nlink:
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        with suppress(FileNotFoundError):
            os.unlink(hidden)
    raise OSError(errno.EAGAIN, f"{hidden} is taken away whenever it is made")


class Staged:
    """A file written and synced under a hidden name; `place` gives it its name in one step, `drop` forgets it.

    The hidden name starts with a dot and ends in .tmp, so dataset readers never take it for a part. `final` may become another
    name in the same folder before it is placed.
    """

    def __init__(self, final: Path, write: Callable[[BinaryIO], object]) -> None:
        self.final = final
        self._hidden: Path | None = final.parent / f".{final.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        self._stream: BinaryIO | None = None
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._stream = os.fdopen(new_locked(self._hidden), "ab")
            write(self._stream)
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except BaseException:
            self.drop()
            raise

    @property
    def hidden(self) -> Path:
        assert self._hidden is not None, "a file is placed once, and not after it was dropped"
        return self._hidden

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def place(self) -> None:
        os.replace(self.hidden, self.final)
        self._hidden = None
        self._close()
        sync_folder(self.final.parent)

    def drop(self) -> None:
        if self._hidden is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._hidden)
            self._hidden = None
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            # After an error its buffer may hold bytes that the disk refuses again; they are not wanted.
            with suppress(OSError):
                self._stream.close()
            self._stream = None


def write_whole(final: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write `final` so that readers see the old content or the new one, also after a crash. Raises OSError."""
    with Staged(final, write) as staged:
        staged.place()


def write_bytes(final: Path, data: bytes) -> None:
    """`write_whole` of these bytes."""
    write_whole(final, lambda stream: stream.write(data))


def remove_stale(folder: Path, older_than_s: float = 86_400.0) -> None:
    """Remove hidden leftovers of killed writers: files that nobody holds locked.

    Where there are no locks only those older than `older_than_s`: no writer keeps one for longer than seconds.
    """
    for path in folder.glob(".*.tmp"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # gone meanwhile, or another user's
        try:
            mine = locked(file)
            if mine is None:
                mine = time.time() - os.fstat(file).st_mtime > older_than_s
            if mine:
                with suppress(FileNotFoundError, PermissionError):
                    path.unlink()
        finally:
            os.close(file)


@contextmanager
def disk_errors(doing: str, root: Path, gone: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError that says what to do; `gone`: one that passes as it is."""
    try:
        yield
    except gone:
        raise
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
    """Raise ConfigError unless files can be made in `folder`, which may not exist yet, with `need_bytes` to spare.

    Nothing that is created stays.
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
        if problem.errno in _FULL:
            remedies = "Free some space (or raise the quota), or choose another result folder"
        else:
            remedies = f"{remedy}, or make this one writable"
        raise ConfigError(
            f"result folder {folder}: cannot write in {ancestor} ({problem.strerror or problem}). {remedies}."
        ) from problem
    if free < need_bytes:
        raise ConfigError(
            f"result folder {folder}: {free / 2**20:.0f} MiB free, at least {need_bytes / 2**20:.0f} MiB are needed. "
            f"{remedy}, or free some space."
        )

"""File operations that survive a crash: atomic writes, locks and checksums, and messages for failed writes."""

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
"""Error numbers of flock on a file system without locks."""
_DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, no spaces and no NaN. Equal values give equal text.

    Raises ValueError for NaN and infinities, TypeError for values that JSON cannot express.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def checksum(data: bytes) -> str:
    """Return the first 16 hex digits of the sha256."""
    return hashlib.sha256(data).hexdigest()[:16]


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(file: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to take the flock of an open file. Return False if another process has it, None without locks, else True."""
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
    """Wait for the exclusive flock of a file, and hold it during the block. Without locks, do not wait."""
    descriptor = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as problem:
            if problem.errno not in NO_LOCKS:
                raise
        yield
    finally:
        # Closing is not enough: a process that was forked meanwhile has the file open too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def new_locked(hidden: Path) -> int:
    """Create a file and lock it, so that `remove_stale` keeps it. Return a descriptor to read and append.

    Raises OSError.
    """
    for _ in range(100):
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(hidden)
    raise OSError(errno.EAGAIN, f"{hidden} is removed whenever it is created")


class Staged:
    """A file that is written and synced under a hidden name. `place` renames it to `final` in one step; `drop` removes
    it.

    Readers of the store ignore the hidden name. Before `place`, `final` may be set to another name in the folder.
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
    """Write `final` so that readers see either the old or the new content, even after a crash. Raises OSError."""
    with Staged(final, write) as staged:
        staged.place()


def write_bytes(final: Path, data: bytes) -> None:
    """Write `data` to a file as `write_whole` does."""
    write_whole(final, lambda stream: stream.write(data))


def remove_stale(folder: Path, older_than_s: float = 86_400.0) -> None:
    """Remove hidden files that no process has locked: the leftovers of killed writers.

    Without locks, only files older than `older_than_s` are removed; writing a file takes seconds.
    """
    for path in folder.glob(".*.tmp"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # gone meanwhile, or another user's
        try:
            is_abandoned = try_lock(descriptor)
            if is_abandoned is None:
                is_abandoned = time.time() - os.fstat(descriptor).st_mtime > older_than_s
            if is_abandoned:
                with suppress(FileNotFoundError, PermissionError):
                    path.unlink()
        finally:
            os.close(descriptor)


@contextmanager
def disk_errors(doing: str, root: Path, gone: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError with a remedy.

    doing: what the block does, for the message.
    root: the result folder, for the message.
    gone: types of exceptions that pass unchanged.
    """
    try:
        yield
    except gone:
        raise
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if problem.errno in _DISK_FULL_ERRORS:
            remedy = "Free space (or raise the quota or file size limit)"
        elif problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "Make the folder writable for this user"
        else:
            remedy = "Check the disk or file system"
        raise StoreError(
            f"{doing} failed under {root}: {reason}. Nothing was left half-written. {remedy} and run the same command "
            "again: it continues at the first missing sample."
        ) from problem


def check_folder(folder: Path, need_bytes: int, kind: str = "result folder") -> None:
    """Raise ConfigError unless files can be created in `folder`, which may not exist yet, and `need_bytes` are free.

    No file or folder is left behind.

    kind: name of the folder in messages.
    """
    ancestor = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    remedy = f"Choose another {kind}"
    if not ancestor.is_dir():
        raise ConfigError(f"{kind} {folder}: {ancestor} is not a folder. {remedy}, or move that file away.")
    try:
        with tempfile.TemporaryFile(dir=ancestor) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
        free_bytes = shutil.disk_usage(ancestor).free
    except OSError as problem:
        if problem.errno in _DISK_FULL_ERRORS:
            remedies = f"Free some space (or raise the quota), or choose another {kind}"
        else:
            remedies = f"{remedy}, or make this one writable"
        raise ConfigError(
            f"{kind} {folder}: cannot write in {ancestor} ({problem.strerror or problem}). {remedies}."
        ) from problem
    if free_bytes < need_bytes:
        raise ConfigError(
            f"{kind} {folder}: {free_bytes / 2**20:.0f} MiB are free, but at least {need_bytes / 2**20:.0f} MiB "
            f"are needed. {remedy}, or free some space."
        )

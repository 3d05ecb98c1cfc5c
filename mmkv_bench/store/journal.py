r"""The journal: one file per writer, one checksummed line per sample, on disk before a commit returns.

A line is `<first 16 hex digits of the text's sha256> <JSON text>\n`. A crash can damage only the last line. Readers
drop a damaged last line and refuse other damage. The writer holds an exclusive flock until its process ends. A lock
that can be taken thus means an abandoned journal, which another process may publish (see `claim`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.errors import StoreError
from mmkv_bench.store.files import canonical_json, checksum, new_locked, sync_folder, try_lock


@dataclass(frozen=True)
class Content:
    """The content of a journal.

    records: the records, one per sample.
    data: the bytes of the intact lines.
    torn: number of bytes of a damaged last line; 0 without one.
    """

    records: list[dict[str, Any]]
    data: bytes
    torn: int


def read(path: Path) -> Content:
    """Return the content of a journal, also while another process writes it.

    Raises:
        FileNotFoundError: the journal was published meanwhile.
        StoreError: damage before the last line.
    """
    damaged_line: int | None = None
    for attempt in range(3):
        content, damaged_line = _parse(path.read_bytes())
        if damaged_line is None:
            return content
        # A writer that ran out of disk cuts off its torn line. A read at that moment can look damaged, so read again.
        time.sleep(0.05 * attempt)
    raise StoreError(
        f"{path}, line {damaged_line}: the checksum does not match but intact lines follow, so the file is damaged, not "
        "just cut short. Restore the file, or move it away: samples that only it holds are then generated again."
    )


def _parse(raw: bytes) -> tuple[Content, int | None]:
    """Parse a journal's bytes. Return content, and the number of the first damaged line before the last, or None."""
    records: list[dict[str, Any]] = []
    line_start = 0
    while line_start < len(raw):
        line_end = raw.find(b"\n", line_start) + 1
        line = raw[line_start : line_end or len(raw)]
        json_bytes = line[17:-1]
        if not line_end or line[16:17] != b" " or line[:16] != checksum(json_bytes).encode():
            if line_end and line_end < len(raw):
                return Content([], b"", 0), len(records) + 1
            break
        records.append(json.loads(json_bytes))
        line_start = line_end
    return Content(records, raw[:line_start], len(raw) - line_start), None


class Journal:
    """A journal that this process writes. Not thread-safe."""

    def __init__(self, folder: Path, name: str) -> None:
        """Create `<folder>/<name>-<random>.jsonl`, which is locked as soon as it is visible. Raises OSError."""
        self.path = folder / f"{name}-{uuid.uuid4().hex[:12]}.jsonl"
        hidden = folder / f".{self.path.name}.tmp"
        self._file = new_locked(hidden)
        try:
            os.rename(hidden, self.path)
            sync_folder(folder)
        except BaseException:
            os.close(self._file)
            with suppress(FileNotFoundError):
                os.unlink(hidden)
            raise
        self.size = 0

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, and return when it is on disk. After an exception the journal is unchanged.

        Raises OSError; FileNotFoundError if the journal's file was removed or renamed.
        """
        json_bytes = canonical_json(record).encode()
        line = memoryview(checksum(json_bytes).encode() + b" " + json_bytes + b"\n")
        try:
            written_bytes = 0
            while written_bytes < len(line):
                written_bytes += os.write(self._file, line[written_bytes:])
            os.fsync(self._file)
            self.check()
        except BaseException:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(line)

    def check(self) -> None:
        """Raise FileNotFoundError if the journal, or a folder above it, was removed, renamed or replaced."""
        if not os.path.samestat(os.fstat(self._file), os.stat(self.path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def close(self) -> None:
        """Release the lock. The file stays and counts as abandoned. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def claim(path: Path) -> int | None:
    """Lock an abandoned journal. Return its open descriptor, which the caller closes.

    Return None if another process has the journal, the file is gone, or the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # The previous holder may have published and removed the journal: then this file has no name any more.
        if try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def in_use(path: Path) -> bool:
    """Tell whether a living process writes the journal."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return try_lock(descriptor, fcntl.LOCK_SH) is False
    finally:
        os.close(descriptor)

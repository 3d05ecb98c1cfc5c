"""Checksums of files, cached with the files' states (see `file_state`), so that gigabytes are read only once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import cache_dir, outlives_the_process, replace_json, state_of


def digest_of(files: Iterable[tuple[str, Path]], cache: Path | None = None) -> str:
    """Return the sha256 (hex) over names and contents of files, in the order given.

    The checksum of each file is cached with the file's state. A cache that cannot be written only costs time.

    Args:
        files: pairs (name, path).
        cache: the cache's folder, `cache_dir()` by default.

    Raises:
        ConfigError: a file changes while it is read. OSError: a file cannot be read.
    """
    memory = Checksums((cache or cache_dir()) / "checksums.json")
    combined = hashlib.sha256()
    for name, file in files:
        combined.update(f"{name}\0{memory.digest(file)}\n".encode())
    memory.save()
    return combined.hexdigest()


class Checksums:
    """A cache of file checksums in one JSON file, replaced by a rename: path -> the file's state and its sha256."""

    here: ClassVar[dict[str, list[Any]]] = {}
    """The checksums that this process has computed. They include those that may not be written to the cache, so that files
    are not read again after the weights are loaded."""

    def __init__(self, file: Path):
        self.file = file
        self.new: dict[str, list[Any]] = {}
        self.known = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def remembered(self, file: Path) -> str | None:
        """Return the cached checksum of a file, or None if its state is not cached. Raises OSError."""
        path, state = str(file.resolve()), state_of(file)
        for entry in (self.here.get(path), self.known.get(path)):
            if isinstance(entry, list) and entry[:-1] == list(state):
                return str(entry[-1])
        return None

    def digest(self, file: Path) -> str:
        """Return the sha256 (hex) of a file's content. Raises what `digest_of` raises."""
        path, state = str(file.resolve()), state_of(file)
        checksum = self.remembered(file)
        if checksum is not None:
            return checksum
        checksum = file_sha256(file)
        if state_of(file) != state:
            raise ConfigError(
                f"{file} changed while its checksum was computed; start the run when the file is complete"
            )
        if state.settled:
            self.here[path] = [*state, checksum]
        if outlives_the_process(file, state):
            self.new[path] = [*state, checksum]
        return checksum

    def save(self) -> None:
        """Add the new checksums to the file, and keep those that other processes wrote."""
        if self.new:
            with suppress(OSError):
                replace_json(self.file, self._read() | self.new)


def file_sha256(file: Path) -> str:
    """Return the sha256 (hex) of a file's content; always reads the file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

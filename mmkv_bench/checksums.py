"""Checksums of files, remembered with the files' states (see `file_state`), so that gigabytes are read once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import cache_dir, outlives_the_process, state_of


def digest_of(files: Iterable[tuple[str, Path]], cache: Path | None = None) -> str:
    """Sha256 (hex) over names and contents of files, in the order given.

    A file's checksum is remembered with its state; a memory that cannot be written costs time only.

    Args:
        files: (name, path); cache: the folder of the memory, `cache_dir()` by default.

    Raises:
        ConfigError: a file that is written while it is read. OSError: one that cannot be read.
    """
    memory = Checksums((cache or cache_dir()) / "checksums.json")
    combined = hashlib.sha256()
    for name, file in files:
        combined.update(f"{name}\0{memory.digest(file)}\n".encode())
    memory.save()
    return combined.hexdigest()


class Checksums:
    """Checksums of files seen before, in one JSON file written by rename: path -> the file's state, then its sha256."""

    here: ClassVar[dict[str, list[Any]]] = {}
    """What this process has read itself. It holds what cannot be written down too, so that a look after the weights were
    loaded reads nothing again."""

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
        """The checksum of a file whose state is known; None where it would have to be read. Raises OSError."""
        path, state = str(file.resolve()), state_of(file)
        for entry in (self.here.get(path), self.known.get(path)):
            if isinstance(entry, list) and entry[:-1] == list(state):
                return str(entry[-1])
        return None

    def digest(self, file: Path) -> str:
        """Sha256 (hex) of a file's content. Raises what `digest_of` raises."""
        path, state = str(file.resolve()), state_of(file)
        checksum = self.remembered(file)
        if checksum is not None:
            return checksum
        checksum = file_sha256(file)
        if state_of(file) != state:
            raise ConfigError(f"{file} changed while its checksum was made; start the run when it is written")
        if state.settled:
            self.here[path] = [*state, checksum]
        if outlives_the_process(file, state):
            self.new[path] = [*state, checksum]
        return checksum

    def save(self) -> None:
        """Write what is new beside what others wrote."""
        if not self.new:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=".checksums")
            with os.fdopen(handle, "w") as stream:
                json.dump(self._read() | self.new, stream)
            os.replace(name, self.file)
        except OSError:
            return


def file_sha256(file: Path) -> str:
    """Sha256 (hex) of a file's content, read now."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

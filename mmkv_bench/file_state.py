"""State of a file, by which a changed file is recognised without reading it, and checksums cached with states.

Size and modification time do not suffice: archives with fixed dates, Nix and image layers give two files equal ones. A
file that is replaced gets another inode. A file that is written in place, or whose times are set, gets another time of
change (ctime), which no program can set. Exceptions:

- Timestamps are coarse (4 ms on ext4, 2 s on FAT): a file that changed less than `SETTLED_NS` ago may change again
  unseen.
- Windows has no time of change, and file systems of packed images (squashfs, erofs, iso9660) store none: they report
  the modification time instead, and give equal inode numbers to images built alike.
- Network file systems answer from attribute caches. Opening a file makes NFS query its server, so states are taken of
  open files. File systems on object stores that invent inode and ctime are as reliable as their times.
- Container layers may report other numbers for the same file after each start: then the file is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmkv_bench.errors import ConfigError

SETTLED_NS = 2_000_000_000


class State(NamedTuple):
    """The state of a file: device, inode, time of change and of modification [ns], and size [bytes].

    Equal states mean equal content, with the exceptions in the module's docstring.
    """

    device: int
    inode: int
    changed: int
    modified: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> State:
        return cls(status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size)

    @property
    def settled(self) -> bool:
        """True if the last change is so long ago that another change would give another state."""
        return time.time_ns() - self.changed > SETTLED_NS


def state_of(file: str | Path) -> State:
    """Return the state of a file. The file is opened, so that network file systems ask their server. Raises OSError."""
    with open(file, "rb") as stream:
        return State.of(os.fstat(stream.fileno()))


def outlives_the_process(file: str | Path, state: State) -> bool:
    """Tell whether a file with an equal state, read by a later process, has equal content (see the module's docstring)."""
    if os.name == "nt" or not state.settled:
        return False
    is_read_only = os.statvfs(file).f_flag & os.ST_RDONLY
    return not (is_read_only and state.changed == state.modified)


def cache_dir() -> Path:
    """Return the cache folder: `$MMKV_BENCH_CACHE`, else `$XDG_CACHE_HOME/mmkv_bench`, else `~/.cache/mmkv_bench`."""
    chosen_folder = os.environ.get("MMKV_BENCH_CACHE")
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen_folder).expanduser() if chosen_folder else Path(cache_home) / "mmkv_bench"


def replace_json(file: Path, value: Any, indent: int | None = None) -> None:
    """Write a value as JSON to a file, replacing an earlier file in one step. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}")
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump(value, stream, indent=indent)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def installed() -> tuple[Path, ...]:
    """Return the folders of the standard library, of installed packages, and of this package."""
    paths = sysconfig.get_paths()
    folder_names = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {*site.getsitepackages()}
    folder_names |= {site.getusersitepackages(), str(Path(__file__).parent)}
    return tuple(dict.fromkeys(Path(name).resolve() for name in folder_names))


def is_installed(file: Path) -> bool:
    """Tell whether a resolved path belongs to the standard library, an installed package, or this package."""
    return any(file.is_relative_to(folder) for folder in installed())


# ---------------------------------------------------------------------- checksums
def digest_of(files: Iterable[tuple[str, Path]], cache: Path | None = None) -> str:
    """Return the sha256 (hex) over the names and contents of files, in the order given, with cached checksums.

    Args:
        files: pairs (name, path).
        cache: the cache's folder, `cache_dir()` by default. A cache that cannot be written only costs time.

    Raises:
        ConfigError: a file changes while it is read.
        OSError: a file cannot be read.
    """
    cached_checksums = Checksums((cache or cache_dir()) / "checksums.json")
    combined_sha256 = hashlib.sha256()
    for name, file in files:
        combined_sha256.update(f"{name}\0{cached_checksums.digest(file)}\n".encode())
    cached_checksums.save()
    return combined_sha256.hexdigest()


class Checksums:
    """A cache of file checksums in one JSON file: path -> state and sha256 of the file."""

    here: ClassVar[dict[str, list[Any]]] = {}
    """Checksums computed by this process, also those that may not be written to the cache."""

    def __init__(self, file: Path):
        self.file = file
        self.new: dict[str, list[Any]] = {}
        self.known = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            cached_entries = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return cached_entries if isinstance(cached_entries, dict) else {}

    def cached_digest(self, file: Path) -> str | None:
        """Return the cached sha256 of a file, or None if none is cached for its present state. Raises OSError."""
        path, state = str(file.resolve()), state_of(file)
        for entry in (self.here.get(path), self.known.get(path)):
            if isinstance(entry, list) and entry[:-1] == list(state):
                return str(entry[-1])
        return None

    def digest(self, file: Path) -> str:
        """Return the sha256 (hex) of a file, from the cache if it is unchanged. Raises the errors of `digest_of`."""
        path, state = str(file.resolve()), state_of(file)
        checksum = self.cached_digest(file)
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
        """Add the new checksums to the cache's file, if the file can be written."""
        if self.new:
            with suppress(OSError):
                replace_json(self.file, self._read() | self.new)


def file_sha256(file: Path) -> str:
    """Return the sha256 (hex) of a file's content, without a cache."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

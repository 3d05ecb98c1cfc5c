"""The state of a file, which tells its content from any other content at its path without reading it.

Size and modification time do not: archives with fixed dates, Nix and image layers give two files the same ones. A file that is
replaced gets another inode, and one that is written in place, or whose times are set, another time of change (ctime), which
no program can set. Where this does not hold:

- Timestamps are coarse (4 ms on ext4, 2 s on FAT): a file that changed less than `SETTLED_NS` ago may change again unseen.
- Windows has no time of change, and file systems of packed images (squashfs, erofs, iso9660) keep none: they show the
  modification time in its place, and number their inodes alike for images built alike.
- Network file systems answer from caches of attributes. Opening a file makes NFS ask its server, which is why a state is
  taken of an open file. File systems on object stores that make up both numbers are as good as the times they make up.
- Layers of a container may show other numbers for the same file after each start: then it is read again.
"""

from __future__ import annotations

import os
import site
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

SETTLED_NS = 2_000_000_000


class State(NamedTuple):
    """Device, inode, time of change and of modification [ns], and size [bytes] of a file."""

    device: int
    inode: int
    changed: int
    modified: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> State:
        """The state in a result of `os.stat`."""
        return cls(status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size)

    @property
    def settled(self) -> bool:
        """True where the last change is so long ago that a further one would show."""
        return time.time_ns() - self.changed > SETTLED_NS


def state_of(file: str | Path) -> State:
    """The state of a file that can be opened. Raises OSError."""
    with open(file, "rb") as stream:
        return State.of(os.fstat(stream.fileno()))


def outlives_the_process(file: str | Path, state: State) -> bool:
    """True where an equal state in another process means equal content: see the exceptions above."""
    if os.name == "nt" or not state.settled:
        return False
    read_only = os.statvfs(file).f_flag & os.ST_RDONLY
    return not (read_only and state.changed == state.modified)


def cache_dir() -> Path:
    """Return the cache folder: `$MMKV_BENCH_CACHE`, else `$XDG_CACHE_HOME/mmkv_bench`, else `~/.cache/mmkv_bench`."""
    chosen = os.environ.get("MMKV_BENCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen).expanduser() if chosen else Path(base) / "mmkv_bench"


@cache
def installed() -> tuple[Path, ...]:
    """Folders of the standard library, of installed packages, and this package."""
    paths = sysconfig.get_paths()
    names = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {*site.getsitepackages()}
    names |= {site.getusersitepackages(), str(Path(__file__).parent)}
    return tuple(dict.fromkeys(Path(name).resolve() for name in names))


def is_installed(file: Path) -> bool:
    """True for a resolved path in one of these folders."""
    return any(file.is_relative_to(folder) for folder in installed())

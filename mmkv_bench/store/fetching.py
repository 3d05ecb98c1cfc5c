"""From a published store to rows on this machine: every file is checked before it gets its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.files import check_folder, disk_errors, remove_stale, write_whole
from mmkv_bench.store.places import Place
from mmkv_bench.store.published import MANIFEST, Entry, entries_of
from mmkv_bench.store.schema import SCHEMAS

LARGEST_MANIFEST = 16 << 20


def fetch(
    source: Place, out: Path, sha256: str | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[int, int]:
    """Fetches what `source` publishes into `out`. What is there already and right is not fetched again.

    Args:
        sha256: the manifest's, as `publish` returned it; None: its checksums are taken as they come.
        say: is told of each file.

    Returns:
        How many files were fetched, and how many were there.

    Raises:
        ConfigError: `out` holds other rows, or has no room.
        StoreError: the manifest or a file is missing, cannot be had, or is not what its checksum says.
    """
    where = f"{source.shown}/{MANIFEST}"
    text = _manifest(source, where)
    if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256.lower():
        raise StoreError(f"{where} has sha256 {hashlib.sha256(text).hexdigest()}, not {sha256}; nothing was fetched")
    entries = entries_of(text, where)
    missing = _missing(entries, out)
    if missing:
        check_folder(out, sum(entry.bytes for entry in missing) + (1 << 20))
    for number, entry in enumerate(missing, 1):
        say(f"{number} of {len(missing)}: {entry.path}, {entry.bytes / 2**20:.1f} MiB")
        target = out / entry.path
        with disk_errors("fetching", out):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(target.parent)
            write_whole(target, partial(_write, source, entry))
    return len(missing), len(entries) - len(missing)


def _manifest(source: Place, where: str) -> bytes:
    text = b""
    for piece in source.chunks(MANIFEST):
        text += piece
        if len(text) > LARGEST_MANIFEST:
            raise StoreError(f"{where} is larger than any manifest; give the folder or address of published rows")
    return text


def _missing(entries: Sequence[Entry], out: Path) -> list[Entry]:
    """Entries that `out` lacks; a file of the same name with other content, or rows besides, are refused."""
    todo = "name another folder, or move that one away"
    wanted = {entry.path for entry in entries}
    for table in ("journal", *SCHEMAS):
        for path in sorted((out / table).glob("*")):
            if not path.name.startswith(".") and path.relative_to(out).as_posix() not in wanted:
                raise ConfigError(f"{path} is not part of what is fetched: {out} holds other rows; {todo}")
    missing = []
    for entry in entries:
        path = out / entry.path
        if not path.exists():
            missing.append(entry)
        elif path.stat().st_size != entry.bytes or _digest(path) != entry.sha256:
            raise ConfigError(f"{path} is there with other content than {entry.path} of what is fetched; {todo}")
    return missing


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(source: Place, entry: Entry, stream: BinaryIO) -> None:
    """Writes one file; an exception leaves nothing of it behind."""
    shown, digest, size = f"{source.shown}/{entry.name}", hashlib.sha256(), 0
    for piece in source.chunks(entry.name):
        size += len(piece)
        if size > entry.bytes:
            break
        digest.update(piece)
        stream.write(piece)
    if size != entry.bytes:
        more = "more" if size > entry.bytes else f"{size:,}"
        raise StoreError(f"{shown} should have {entry.bytes:,} bytes and has {more}; {_AGAIN}")
    if digest.hexdigest() != entry.sha256:
        raise StoreError(f"{shown} has sha256 {digest.hexdigest()} where the manifest says {entry.sha256}; {_AGAIN}")


_AGAIN = (
    "it was damaged on its way or replaced; nothing of it was kept, files that are right stay. Run the same command again, and "
    "ask who published it if that does not help"
)

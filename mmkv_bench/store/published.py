"""A published store: a flat folder of files, and a manifest of their names, sizes and checksums.

Flat, so that the files can be assets of a release as well as a dataset's repository or a folder of any web server: the
file `responses/packed-12ab.parquet` of a store is published as `responses-packed-12ab.parquet`, beside `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.files import MARK, disk_errors, write_bytes
from mmkv_bench.store.interface import Opened
from mmkv_bench.store.schema import SCHEMAS

PUBLISHED = tuple(
    table for table in SCHEMAS if table != "prompts"
)  # questions are their datasets', which have licences
MANIFEST = "manifest.json"
FORMAT = "mmkv_bench rows 1"
_PATH = re.compile(rf"{re.escape(MARK)}|({'|'.join(PUBLISHED)})/[A-Za-z0-9_][A-Za-z0-9_.-]*\.parquet")
"""All names that a manifest may hold: no absolute one, none that leads out of its folder, none that is hidden."""


@dataclass(frozen=True)
class Entry:
    """One file: its path in the store, its size in bytes, its sha256 in hexadecimal digits."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """As it is published."""
        return self.path.replace("/", "-")


def check_empty(folder: Path) -> None:
    """Raises ConfigError where something is already: asked before packing, which cannot be taken back."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        left = folder.is_dir() and not (folder / MANIFEST).exists() and (folder / MARK).exists()
        why = f" and has no {MANIFEST}: a --publish that was ended early left it; remove it, or" if left else ";"
        raise ConfigError(f"--publish {folder} is not empty{why} name a folder that is not there yet")


def publish(store: Opened, folder: Path) -> str:
    """Copies a packed store into a new folder, flat, with its manifest.

    Args:
        folder: is made; files of others in it would be published as well, so it must be empty.

    Returns:
        The manifest's sha256: whoever has it from a trusted place can check all rows by it.

    Raises:
        ConfigError: the folder holds something.
        StoreError: the disk refuses.
    """
    check_empty(folder)
    entries = []
    with disk_errors("publishing", folder), store.locked():
        paths = [store.root / MARK, *(path for table in PUBLISHED for path in sorted(store.files(table)))]
        for path in paths:
            data = path.read_bytes()
            inside = path.relative_to(store.root).as_posix()
            entry = Entry(inside, len(data), hashlib.sha256(data).hexdigest())
            write_bytes(folder / entry.name, data)
            entries.append(entry)
        text = json.dumps({"format": FORMAT, "files": [asdict(entry) for entry in entries]}, indent=1).encode() + b"\n"
        write_bytes(folder / MANIFEST, text)  # last: what has one is whole
    return hashlib.sha256(text).hexdigest()


def entries_of(text: bytes, where: str) -> list[Entry]:
    """The files of a manifest, `store.json` last: a store that is not whole yet has none and does not open.

    Raises:
        StoreError: it is no manifest, of another format, or names a file that no store has.
    """
    try:
        content = json.loads(text)
        kind = content["format"]
        files = [] if kind != FORMAT else [_entry(file) for file in content["files"]]
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise StoreError(
            f"{where} is no manifest of published rows ({type(problem).__name__}: {problem}); `mmkv-bench pack <rows> "
            "--publish <folder>` makes one"
        ) from None
    if kind != FORMAT:
        raise StoreError(
            f"{where} is of format {kind!r}; this version reads {FORMAT!r}; fetch with the version that wrote it"
        )
    paths = [file.path for file in files]
    if len({*paths}) != len(paths) or MARK not in paths:
        raise StoreError(f"{where} names a file twice or lacks {MARK}; nothing was fetched; ask who published it")
    return sorted(files, key=lambda file: (file.path == MARK, file.path))


def _entry(file: Any) -> Entry:
    path, size, digest = file["path"], file["bytes"], file["sha256"]
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is no file of a store")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"{path} has no size")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{path} has no sha256")
    return Entry(path, size, digest)

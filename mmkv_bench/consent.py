"""Whose code runs: a file that a command line names is run; a file that stored rows name is run only where the user says so,
and only with the content that the rows say it had."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mmkv_bench.errors import ConfigError

RUN_CODE = "--run-code"
DIGITS = 16
"""Least digits of a checksum that say which file is meant."""


@dataclass
class _Process:
    """Permissions of this process; not of a thread, since samples are prepared in threads.

    Attributes:
        allowed: checksums, or their first digits, of the files of rows that may run; None where no rows name files.
        shown: files whose path was printed.
    """

    allowed: frozenset[str] | None = None
    shown: set[Path] = field(default_factory=set)


_PROCESS = _Process()


class CodeOfRowsError(ConfigError):
    """Stored rows name a file whose code would run."""


@contextmanager
def rows_name_files(digests: Collection[str] = ()) -> Iterator[None]:
    """Refuse to run files, but for those with one of these checksums, while rows of strangers are worked on.

    Args:
        digests: SHA-256 in hexadecimal digits, or the first of them, as the rows hold them. None runs nothing.
    """
    before = _PROCESS.allowed
    _PROCESS.allowed = frozenset(digest for digest in digests if len(digest) >= DIGITS)
    try:
        yield
    finally:
        _PROCESS.allowed = before


def require(path: Path | str, digest: str | None) -> None:
    """Refuse a file that is about to run, where rows named it without the user's consent; else print its path, once.

    Args:
        digest: SHA-256 of what would run; None where rows hold none of such code, so that nothing can vouch for it.

    Raises:
        CodeOfRowsError: inside `rows_name_files`, and the file is none of those allowed.
    """
    allowed = _PROCESS.allowed
    if allowed is None:
        return
    place = Path(path).expanduser().resolve()
    if digest is None:
        raise CodeOfRowsError(
            f"code named by the rows: the task's code in {place} is not run, since rows hold no checksum of it alone; read it "
            "and answer the samples with a run of your own, which names that folder"
        )
    if not allowed:
        raise CodeOfRowsError(
            f"code named by the rows: {place} is not run without {RUN_CODE}; read that file before you give it"
        )
    if not any(digest.startswith(prefix) for prefix in allowed):
        raise CodeOfRowsError(
            f"code named by the rows: {place} is not run, since it is not the file of the rows: its checksum is "
            f"{digest[:DIGITS]}, theirs {', '.join(sorted(allowed))}; get their file"
        )
    if place not in _PROCESS.shown:
        _PROCESS.shown.add(place)
        print(f"mmkv_bench: runs {place} ({digest[:DIGITS]}), which the rows name", file=sys.stderr)


def require_folder(folder: str) -> None:
    """Refuse a config folder of rows that is not a plain folder: Hydra imports the module that `pkg://` names.

    Raises:
        CodeOfRowsError: inside `rows_name_files`, and the folder has such an address.
    """
    if _PROCESS.allowed is not None and "://" in folder:
        raise CodeOfRowsError(
            f"code named by the rows: the config folder {folder} is not opened; allowed: plain folders"
        )

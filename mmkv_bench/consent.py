"""Consent to run code files.

A file named on the command line runs. A file named by stored rows runs only if the user allows it, and only with the
content that the rows recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmkv_bench.errors import ConfigError

RUN_CODE = "--run-code"
DIGITS = 16
"""Fewest leading digits of a checksum that identify a file."""


_ALLOWED_DIGESTS: list[frozenset[str]] = []
"""Checksums, or their first digits, of files that may run: one set per entered block of `rows_name_files`. All threads
share them, because samples are prepared in threads."""
_PRINTED_PATHS: set[Path] = set()


class CodeOfRowsError(ConfigError):
    """Code named by stored rows was refused."""


@contextmanager
def rows_name_files(digests: Collection[str] = ()) -> Iterator[None]:
    """Forbid inside the block to run code files that stored rows name, except files with one of these checksums.

    digests: SHA-256 in hexadecimal digits, or their first digits, as the rows store them. Without any, no file runs.
    """
    _ALLOWED_DIGESTS.append(frozenset(digest for digest in digests if len(digest) >= DIGITS))
    try:
        yield
    finally:
        _ALLOWED_DIGESTS.pop()


def require(path: Path | str, digest: str | None) -> None:
    """Inside a `with rows_name_files` block, refuse a code file that is not allowed, and print the path of an allowed one once.

    Outside of such blocks every file may run.

    Args:
        path: the file, or the folder of a task's code.
        digest: SHA-256 of the code that would run; None: the rows store no checksum of
            this kind of code, and the file is refused.

    Raises:
        CodeOfRowsError: inside `rows_name_files`, the file is not allowed.
    """
    if not _ALLOWED_DIGESTS:
        return
    allowed_digests = _ALLOWED_DIGESTS[-1]
    resolved_path = Path(path).expanduser().resolve()
    if digest is None:
        raise CodeOfRowsError(
            f"code named by the rows: the task's code in {resolved_path} is not run, because rows store no checksum of "
            "that code alone; read the code, then answer the samples with a run of your own that names this "
            "folder"
        )
    if not allowed_digests:
        raise CodeOfRowsError(
            f"code named by the rows: {resolved_path} is not run without {RUN_CODE}; read that file before you give the option"
        )
    if not any(digest.startswith(prefix) for prefix in allowed_digests):
        raise CodeOfRowsError(
            f"code named by the rows: {resolved_path} is not run, because its checksum is {digest[:DIGITS]} and the rows "
            f"have {', '.join(sorted(allowed_digests))}; get the file that the rows were made with"
        )
    if resolved_path not in _PRINTED_PATHS:
        _PRINTED_PATHS.add(resolved_path)
        print(f"mmkv_bench: running {resolved_path} ({digest[:DIGITS]}), a file named by the rows", file=sys.stderr)


def require_folder(folder: str) -> None:
    """Check that a config folder named by rows is a plain folder. For a `pkg://` address Hydra would import a module.

    Raises CodeOfRowsError: inside `rows_name_files`, the folder is such an address.
    """
    if _ALLOWED_DIGESTS and "://" in folder:
        raise CodeOfRowsError(
            f"code named by the rows: the config folder {folder} is not opened; allowed: plain folders"
        )

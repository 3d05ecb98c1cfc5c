"""A method file reads no other file, since an edit of that file would change answers under the same cell.

The interpreter tells of every file that Python code opens (audit event `open`, PEP 578), while a method file is imported, built
and used. Where code of a method file is on the stack and the file is no part of an installed package, the opening is refused.
Readers written in C are not heard; `own_text` refuses the modules that hold them.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from mmkv_bench.errors import ConfigError
from mmkv_bench.installed import is_installed

PREFIX = "mmkv_bench_custom_"
"""How the module names of method files begin."""
_KERNEL = ("/dev/", "/proc/", "/sys/")


class OwnFileReadError(ConfigError, PermissionError):
    """A method file opens another file. Libraries that look for a file that need not be there go on without it."""


@cache
def listen() -> None:
    """Have openings by method files refused from now on, once per process."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open":
        return
    path, _, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike) or (isinstance(flags, int) and _writes(flags)):
        return
    method = _method_file()
    if method is None:
        return
    name = os.path.realpath(os.fsdecode(path))
    if name != os.path.realpath(method) and not name.startswith(_KERNEL) and not is_installed(Path(name)):
        raise OwnFileReadError(
            f"{method} opens {name}, which the cell's checksum would not cover; put the data into the method file, or give "
            "them as arguments"
        )


def _writes(flags: int) -> bool:
    """Whether nothing that was there before can be read."""
    return bool(flags & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL))


def _method_file() -> str | None:
    """The method file whose code is on the stack of this thread."""
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(PREFIX):
            return frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    return None

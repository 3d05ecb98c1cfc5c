"""A line on a terminal while libraries are imported and a model is loaded; gone when the work that it names is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_ERASE = "\r\x1b[2K"


@contextmanager
def waiting(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show `what ...` on a terminal until the block ends, an error too, whose sentence then stands on a line of its own.
    Logs and pipes get nothing: to them it would say nothing later.

    Args:
        stream: where it is shown, stderr by default; stdout stays for results.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield
        return
    stream.write(f"{what} ...")
    stream.flush()
    try:
        yield
    finally:
        stream.write(_ERASE)
        stream.flush()

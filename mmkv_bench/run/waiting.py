"""A line while libraries are imported and a model is loaded: on a terminal gone when the work that it names is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_ERASE = "\r\x1b[2K"


@contextmanager
def waiting(what: str, stream: TextIO | None = None, log: bool = False) -> Iterator[None]:
    """Show `what ...` on a terminal until the block ends, an error too, whose sentence then stands on a line of its own.

    Args:
        stream: where it is shown, stderr by default; stdout stays for results.
        log: logs and pipes get it as well, where it stays: the sign that a run has begun. Others would say nothing later.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        if log:
            print(f"{what} ...", file=stream, flush=True)
        yield
        return
    stream.write(f"{what} ...")
    stream.flush()
    try:
        yield
    finally:
        stream.write(_ERASE)
        stream.flush()

"""Forks writers and kills them (SIGKILL), as JSON lines on standard input ask; answers each line with one.

A line lists requests, whose writers work side by side. A request names `root`, `samples`, `publish_every`, perhaps `cells`,
and when to die: by the parent's hand, `after` seconds from the start or, with `acknowledged` n, from the n-th acknowledged
sample; or by its own, `before` n: right before the n-th open, rename, removal, truncation, listing or lock of a file in the
store, which Python's audit events announce. The answer, per request: the exit code, the operation it died before, the
samples it had acknowledged. Forking from one process that has everything imported makes hundreds of kills affordable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from typing import TextIO

import pandas  # noqa: F401 - pyarrow imports it at its first conversion: once here instead of in every fork
from crash_points import die_before
from writer_child import CELLS, write_missing


def begin(request: dict) -> tuple[int, TextIO]:
    """A forked writer and what it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, b"started\n")
            if "before" in request:
                tell = partial(os.write, writing)
                die_before(request["before"], request["root"], lambda event: tell(f"before {event}\n".encode()))
            cells = tuple(request.get("cells", CELLS))
            write_missing(request["root"], "w", request["samples"], request["publish_every"], cells, writing)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    return child, os.fdopen(reading)


def end(request: dict, child: int, stream: TextIO) -> dict:
    with stream:
        lines = []
        if "after" in request:
            lines = [stream.readline() for _ in range(1 + request["acknowledged"])]
            time.sleep(request["after"])
            os.kill(child, signal.SIGKILL)
        lines += stream.readlines()
    said = [line.split() for line in lines if line.endswith("\n")]
    return {
        "code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
        "acknowledged": [words[1] for words in said if words[0] == "ack"],
        "operation": next((words[1] for words in said if words[0] == "before"), None),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        requests = json.loads(line)
        children = [begin(request) for request in requests]
        print(json.dumps([end(request, *child) for request, child in zip(requests, children, strict=True)]), flush=True)

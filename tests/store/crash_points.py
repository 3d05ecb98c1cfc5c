"""Death at a chosen operation on a file, announced by Python's audit events (so nothing is patched)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate", "os.listdir", "os.scandir", "fcntl.flock"}


def die_before(n: int, root: str, last_words: Callable[[str], None] = lambda event: None) -> None:
    """SIGKILLs this process right before its n-th open, rename, removal, truncation, listing or lock under `root`.

    Audit hooks stay for good: call it in a process made for dying.
    """
    seen = 0

    def audit(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in EVENTS and (event == "fcntl.flock" or root in str(arguments[0])):
            seen += 1
            if seen == n:
                last_words(event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)

"""Slurm's programs, each with a time limit: a controller that does not answer holds no sweep up for ever."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

WAIT_S = 20.0
"""Seconds that a question waits: a loaded controller answers within some, squeue itself gives up after about ten."""
SUBMIT_S = 60.0
"""Seconds that sbatch may take: it may wait for a controller that changes places."""


def ask(words: Sequence[str], wait_s: float | None = None) -> subprocess.CompletedProcess[str] | None:
    """What a program answers, None where it does not within `wait_s` [s] (`WAIT_S`) or is not here.

    It is ended then with all that it started, as a site's wrapper does.
    """
    try:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError:
        return None
    try:
        out, err = process.communicate(timeout=WAIT_S if wait_s is None else wait_s)
    except BaseException as problem:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(problem, subprocess.TimeoutExpired):
            return None
        raise
    return subprocess.CompletedProcess([*words], process.returncode, out, err)

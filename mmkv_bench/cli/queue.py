"""A user's jobs in the queue of Slurm. Rows tell what is done; the queue tells who may still add some, and why others
do not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence

JOB = "mmkv"
"""Prefix of the names of our jobs."""
UNFINISHED = (
    *("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
"""States in which a job ended before its work did; one that is queued again later counts by its newest."""
_WAIT = 10.0  # seconds; a controller that does not answer holds nobody up


def jobs() -> Mapping[str, int] | str | None:
    """State (`RUNNING`, `PENDING`, ...) -> this user's jobs in it, every task of an array by itself; a sentence where the
    queue cannot be asked, None where there is no Slurm."""
    squeue = shutil.which("squeue")
    if squeue is None:
        return None
    try:
        asked = _asked([squeue, "--me", "--array", "--noheader", "--format=%T %j"])
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"Slurm's queue cannot be asked here: no answer ({problem})"
    if asked.returncode:
        said = (asked.stderr or asked.stdout).strip().splitlines()
        reason = said[-1] if said else f"exit code {asked.returncode}"
        return f"Slurm's queue cannot be asked here: {reason.removeprefix('squeue: ')}"
    return _counted(asked.stdout, " ")


def ended() -> Mapping[str, int]:
    """State (`UNFINISHED`) -> this user's jobs that ended so within a day, by Slurm's accounting; nothing where a site keeps
    none, as many do."""
    sacct = shutil.which("sacct")
    if sacct is None:
        return {}
    words = ["--allocations", f"--user={os.getuid()}", "--starttime=now-1days", "--noheader", "--parsable2"]
    try:
        asked = _asked([sacct, *words, "--format=State,JobName"])
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {} if asked.returncode else _counted(asked.stdout, "|")
    return {state: number for state, number in found.items() if state in UNFINISHED}


def _asked(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=_WAIT, check=False)


def _counted(lines: str, between: str) -> Mapping[str, int]:
    """State -> our jobs in it, from lines of a state and a name; of "CANCELLED by 1000" the first word."""
    rows = (line.partition(between) for line in lines.splitlines())
    return Counter(state.split()[0] for state, _, name in rows if name.startswith(JOB))

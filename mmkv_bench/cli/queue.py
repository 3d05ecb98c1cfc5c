"""What Slurm says of a user's jobs, where there is Slurm. What is done, rows tell; this is who may still add some."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping

JOB = "mmkv"
"""What the names of our jobs begin with."""
_WAIT = 10.0  # seconds; a controller that does not answer holds nobody up


def jobs() -> Mapping[str, int] | str | None:
    """State (`RUNNING`, `PENDING`, ...) -> this user's jobs in it, every task of an array by itself; a sentence where the
    queue cannot be asked, None where there is no Slurm."""
    squeue = shutil.which("squeue")
    if squeue is None:
        return None
    words = [squeue, "--me", "--array", "--noheader", "--format=%T %j"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_WAIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"squeue: no answer ({problem})"
    if asked.returncode:
        said = (asked.stderr or asked.stdout).strip().splitlines()
        return said[-1] if said else f"squeue: exit code {asked.returncode}"
    rows = (line.partition(" ") for line in asked.stdout.splitlines() if line.strip())
    return Counter(state for state, _, name in rows if name.startswith(JOB))

"""The queue: which jobs of earlier and of this sweep are still in it, and waiting until they are not."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from mmkv_bench.errors import ConfigError

_NAME = "jobs.jsonl"
_SHORTEST_S, _LONGEST_S = 1.0, 15.0
_ATTEMPTS = 6


def remember(folder: Path, jobs: Mapping[str, str]) -> None:
    """Notes submitted jobs (id -> what it works on) in a sweep's folder, for the next sweep there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _NAME).open("a") as file:
        file.writelines(json.dumps({"job": job, "subject": subject}) + "\n" for job, subject in jobs.items())


def remembered(folder: Path, subjects: Collection[str]) -> set[str]:
    """Ids of jobs that sweeps submitted from this folder and that work on one of these. Lines that cannot be read, of a
    submission that was killed, count for nothing."""
    found = set()
    for line in (folder / _NAME).read_text().splitlines() if (folder / _NAME).exists() else ():
        try:
            noted = json.loads(line)
        except ValueError:
            continue
        if noted["subject"] in subjects:
            found.add(noted["job"])
    return found


def queued(jobs: Collection[str]) -> set[str] | None:
    """Those of the jobs that are waiting, running or on their way back into the queue; None where Slurm does not answer."""
    asked = ["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%i"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return None if told.returncode else {*jobs} & {*told.stdout.split()}


def surely_queued(jobs: Collection[str]) -> set[str]:
    """As `queued`, asked again for some 20 seconds where Slurm does not answer.

    Raises:
        ConfigError: it never does. Taken for an empty queue, that would submit everything a second time.
    """
    if not jobs:
        return set()
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_SHORTEST_S * 1.5**attempt)
        found = queued(jobs)
        if found is not None:
            return found
    raise ConfigError(
        f"squeue does not answer, and any of {len(jobs)} jobs that were submitted here before may still be at work; nothing "
        "was submitted; run the same command again when it answers"
    )


def wait_for(jobs: Collection[str]) -> None:
    """Returns when none of the jobs is queued any more; a controller that does not answer is asked again."""
    left, pause, said = {*jobs}, _SHORTEST_S, None
    while left:
        found = queued(left)
        left = left if found is None else found
        if left and len(left) != said:
            said = len(left)
            print(f"mmkv_bench: {said} of {len(jobs)} jobs waiting or running", file=sys.stderr)
        if left:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_S)

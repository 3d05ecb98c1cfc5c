"""The Slurm queue: which jobs of this and earlier sweeps are queued or running, and waiting for their end."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mmkv_bench.errors import ConfigError
from mmkv_bench.store.files import try_lock

_FILE_NAME = "jobs.jsonl"
_SHORTEST_S, _LONGEST_S = 1.0, 15.0
_ATTEMPTS = 6


@contextmanager
def sweep_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep's folder during the block, so that a concurrent sweep waits and then sees this sweep's
    jobs.

    On a file system without locks, print a warning and do not wait.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        has_waited = False
        while (has_lock := try_lock(descriptor)) is False:
            if not has_waited:
                print(
                    f"mmkv_bench: another sweep is submitting jobs listed in {folder}; waiting for it", file=sys.stderr
                )
            has_waited = True
            time.sleep(_SHORTEST_S)
        if has_lock is None:
            print(
                f"mmkv_bench: the file system of {folder} has no locks (flock), so concurrent sweeps may submit "
                "the same jobs; start only one sweep at a time",
                file=sys.stderr,
            )
        yield
    finally:
        os.close(descriptor)


def record_jobs(folder: Path, jobs: Mapping[str, Collection[str]]) -> None:
    """Append submitted jobs to the list in a sweep's folder. jobs: job id to `SweepJob.subjects`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _FILE_NAME).open("a") as file:
        for job, subjects in jobs.items():
            file.writelines(json.dumps({"job": job, "subject": subject}) + "\n" for subject in subjects)


def jobs_of_earlier_sweeps(folder: Path, subjects: Collection[str]) -> set[str]:
    """Return the ids of jobs that were submitted from this folder for one of these `SweepJob.subjects`.

    Unreadable lines, left by a killed submission, are ignored.
    """
    job_ids = set()
    for line in (folder / _FILE_NAME).read_text().splitlines() if (folder / _FILE_NAME).exists() else ():
        try:
            job_entry = json.loads(line)
        except ValueError:
            continue
        if job_entry["subject"] in subjects:
            job_ids.add(job_entry["job"])
    return job_ids


def queued_jobs(jobs: Collection[str]) -> set[str] | None:
    """Return the ids among `jobs` that are waiting, running or being queued again; None if Slurm does not answer."""
    squeue_result = ask(["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%i"])
    return None if squeue_result is None or squeue_result.returncode else {*jobs} & {*squeue_result.stdout.split()}


def job_of_script(script: Path) -> str | None:
    """Return the id of the queued job or array that runs this script; None if there is none or Slurm is silent."""
    squeue_result = ask(["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%F|%o"])
    lines = [] if squeue_result is None or squeue_result.returncode else squeue_result.stdout.splitlines()
    job_ids = {name for name, _, command in (line.partition("|") for line in lines) if command.strip() == str(script)}
    return min(job_ids, default=None)


def require_queued_jobs(jobs: Collection[str]) -> set[str]:
    """Return the queued ids among `jobs`. Raise ConfigError if Slurm does not answer for more than 20 seconds.

    Without this, silence would count as an empty queue and everything would be submitted again.
    """
    if not jobs:
        return set()
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_SHORTEST_S * 1.5**attempt)
        queued_ids = queued_jobs(jobs)
        if queued_ids is not None:
            return queued_ids
    raise ConfigError(
        f"squeue does not answer, and {len(jobs)} jobs submitted earlier from this folder may still be running; "
        "nothing was submitted; run the same command again when squeue answers"
    )


def wait_for(jobs: Collection[str]) -> None:
    """Wait until none of the jobs is queued or running. If Slurm does not answer, ask again."""
    remaining_jobs, pause_s, printed_count, is_silent = {*jobs}, _SHORTEST_S, None, False
    while remaining_jobs:
        queued_ids = queued_jobs(remaining_jobs)
        if queued_ids is None and not is_silent:
            print("mmkv_bench: squeue does not answer; asking again until it does", file=sys.stderr)
        is_silent = queued_ids is None
        remaining_jobs = remaining_jobs if queued_ids is None else queued_ids
        if remaining_jobs and len(remaining_jobs) != printed_count:
            printed_count = len(remaining_jobs)
            print(f"mmkv_bench: {printed_count} of {len(jobs)} jobs waiting or running", file=sys.stderr)
        if remaining_jobs:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_S)


WAIT_S = 20.0
"""Seconds to wait for an answer. A loaded controller takes some seconds, and squeue gives up after about ten."""
SUBMIT_S = 60.0
"""Seconds to wait for sbatch, which may wait for a controller to be replaced."""


def ask(words: Sequence[str], wait_s: float | None = None) -> subprocess.CompletedProcess[str] | None:
    """Run a program and return its result, or None if it does not exist or exceeds `wait_s` (default `WAIT_S`).

    A program that takes too long is killed with all processes that it started, because a site's wrapper may start
    others.
    """
    try:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError:
        return None
    try:
        stdout, stderr = process.communicate(timeout=WAIT_S if wait_s is None else wait_s)
    except BaseException as problem:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(problem, subprocess.TimeoutExpired):
            return None
        raise
    return subprocess.CompletedProcess([*words], process.returncode, stdout, stderr)

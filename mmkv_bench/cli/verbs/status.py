"""`mmkv-bench status`: the progress of runs from their rows, and the state of Slurm jobs that may add rows."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.main import clear_screen
from mmkv_bench.errors import ConfigError
from mmkv_bench.text_columns import align_columns

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.status import Status

RUNS = Path("runs")
_HEADINGS = ("dataset", "cells", "samples", "answers", "complete", "failed", "scored")
_WAIT_S = 10.0
"""Seconds to wait for Slurm's controller."""
JOB = "mmkv"
"""Prefix of the names of this package's jobs."""
UNFINISHED = (
    *("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
"""States of jobs that ended before their work. A job that is queued again counts by its newest state."""


def status(given: argparse.Namespace) -> int:
    """Print how many answers of each store are done, failed and missing. Return 0."""
    from mmkv_bench.store.store import Store

    if given.watch is not None and (given.json or not given.watch > 0):
        raise ConfigError(
            f"--watch {given.watch:g} is refused; allowed: seconds above 0, without --json; correct or drop it"
        )
    folders = given.rows or sorted(file.parent for file in RUNS.glob("**/store.json"))
    if not folders:
        raise ConfigError(f"there are no result rows below {RUNS}; name the rows folder that a run printed")
    stores = [Store(folder) for folder in folders]
    while _print(stores, given) and given.watch is not None:
        time.sleep(given.watch)
    return 0


def _print(stores: Sequence[Store], given: argparse.Namespace) -> int:
    """Print the state of the stores once. Return the number of missing answers."""
    from mmkv_bench.tables.status import failed_rows, status

    status_and_failures = [(status(store), failed_rows(store) if given.failed else []) for store in stores]
    queued_jobs = count_queued_jobs()
    ended_jobs = {} if queued_jobs is None else count_ended_jobs()
    if given.json:
        slurm_jobs = {"jobs": queued_jobs, "jobs_ended": ended_jobs}
        print(json.dumps([_document(one, failed, given.failed) | slurm_jobs for one, failed in status_and_failures]))
    else:
        if given.watch is not None and sys.stdout.isatty():
            clear_screen()
        print("\n\n".join("\n".join(_lines(one, failed)) for one, failed in status_and_failures))
        if isinstance(queued_jobs, str):
            print(queued_jobs, file=sys.stderr)
        elif queued_jobs or ended_jobs:
            ended_jobs_text = f"ended within a day: {_counts(ended_jobs)}" if ended_jobs else ""
            print(f"Slurm: {'; '.join(filter(None, [_counts(queued_jobs or {}), ended_jobs_text]))}")
        sys.stdout.flush()
    return sum(one.missing for one, _ in status_and_failures)


def _counts(jobs: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {state.lower()}" for state, number in sorted(jobs.items()))


def _lines(status: Status, failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines about one store: folder, datasets, failures by kind, and failed samples.

    failed: rows of failed samples to list.
    """
    rows = [
        (
            one.dataset,
            str(one.cells),
            str(one.samples),
            f"{one.rows} of {one.planned}",
            f"{one.complete} of {one.cells}",
            str(one.failed),
            f"{one.scored} of {one.cells}" + (f" ({one.stale} to score)" if one.stale else ""),
        )
        for one in status.datasets
    ]
    timed_passes = sum(status.passes.values())
    passes_line = (
        [f"  {timed_passes} passes of scenario=efficiency, {timed_passes - status.passes.get('ok', 0)} failed"]
        if timed_passes
        else []
    )
    if not rows and passes_line:
        return [f"{status.root}: no answers", *passes_line]
    stored_answers = sum(one.rows for one in status.datasets)
    planned_answers = sum(one.planned for one in status.datasets)
    failures = [
        f"  {number} {status} on {dataset}: {reason or 'no reason given'}"
        for (dataset, status, reason), number in status.failures.items()
    ]
    samples = [
        f"  {row['dataset']} {row['sample_id']} {row['label']}: {row['status']}, {row['error']}" for row in failed
    ]
    table = align_columns(_HEADINGS, rows, words=len(_HEADINGS))
    return [
        f"{status.root}: {stored_answers} of {planned_answers} answers",
        *table,
        *_pace(status),
        *passes_line,
        *failures,
        *samples,
    ]


def _pace(status: Status) -> list[str]:
    """Return a line with the writing processes, the rate, and the time left or the newest answer's age, if any."""
    clauses = []
    if status.writers:
        processes = f"{status.writers} process{'es' * (status.writers > 1)}"
        clauses.append(f"{processes} writing, {status.running} cells running")
    if status.rate and (status.writers or status.missing):
        clauses.append(f"{60 * status.rate:,.0f} answers a minute")
    if status.left:
        clauses.append(f"about {_span(status.left)} left at that")
    elif status.missing and status.last is not None and not status.writers:
        clauses.append(f"newest answer {_span(max(time.time() - status.last, 0))} ago")
    return [f"  {'; '.join(clauses)}"] if clauses else []


def _span(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _document(status: Status, failed: Sequence[Mapping[str, Any]], listed: bool) -> dict[str, Any]:
    failures = [
        {"dataset": dataset, "status": ended, "error": reason, "rows": number}
        for (dataset, ended, reason), number in status.failures.items()
    ]
    return {
        "rows": str(status.root),
        "datasets": [asdict(one) for one in status.datasets],
        "failures": failures,
        "passes": dict(status.passes),
        "running": status.running,
        "writers": status.writers,
        "answers_per_second": status.rate,
        "seconds_left": status.left,
        "newest": status.last,
        **({"failed": list(failed)} if listed else {}),
    }


# ---------------------------------------------------------------------- Slurm: the queue tells who may still add rows
def count_queued_jobs() -> Mapping[str, int] | str | None:
    """Count this user's queued jobs of this package, by state (`RUNNING`, ...). Each task of an array counts.

    Return a sentence if the queue cannot be asked, None if there is no Slurm.
    """
    from mmkv_bench.slurm.queue import ask

    if shutil.which("squeue") is None:
        return None
    answer = ask(["squeue", "--me", "--array", "--noheader", "--format=%T %j"], _WAIT_S)
    if answer is None:
        return f"Slurm's queue cannot be asked from this machine: squeue does not answer within {_WAIT_S:g} s"
    if answer.returncode:
        lines = (answer.stderr or answer.stdout).strip().splitlines() or [f"exit code {answer.returncode}"]
        return f"Slurm's queue cannot be asked from this machine: {lines[-1].removeprefix('squeue: ')}"
    return _count_by_state(answer.stdout, " ")


def count_ended_jobs() -> Mapping[str, int]:
    """Count this user's jobs of this package that ended unfinished (`UNFINISHED`) within a day, by state.

    Empty if the cluster keeps no accounting.
    """
    from mmkv_bench.slurm.queue import ask

    sacct_flags = ["--allocations", f"--user={os.getuid()}", "--starttime=now-1days", "--noheader", "--parsable2"]
    answer = ask(["sacct", *sacct_flags, "--format=State,JobName"], _WAIT_S)
    jobs_by_state = {} if answer is None or answer.returncode else _count_by_state(answer.stdout, "|")
    return {state: number for state, number in jobs_by_state.items() if state in UNFINISHED}


def _count_by_state(lines: str, between: str) -> Mapping[str, int]:
    """Count this package's jobs by state in the output of a Slurm command.

    lines: one job per line: state, the separator `between`, name. Only the first word of a state counts.
    """
    rows = (line.partition(between) for line in lines.splitlines())
    return Counter(state.split()[0] for state, _, name in rows if name.startswith(JOB))

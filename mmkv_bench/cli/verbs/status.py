"""`mmkv-bench status`: how far runs are, from their rows, and what Slurm says of jobs that may add some."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import Parser, rows_folder
from mmkv_bench.cli.output import clear_screen
from mmkv_bench.cli.queue import ended, jobs
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.status import Status

SUMMARY = "how far runs are: cells, samples, failures and scores of their rows; works while they are written"

RUNS = Path("runs")
_HEADS = ("dataset", "cells", "samples", "answers", "complete", "failed", "scored")


def options(parser: Parser) -> None:
    """Add rows folders, failures, watching and the form."""
    parser.add_argument("rows", type=Path, nargs="*", help=f"rows folders; all below {RUNS} by default")
    parser.add_argument("--failed", action="store_true", help="list the samples that failed, with the reason of each")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=10.0,
        metavar="SECONDS",
        help="say it again every so often (10 s) until all answers are there or Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.examples("mmkv-bench status", "mmkv-bench status runs/demo --failed", "mmkv-bench status runs/demo --watch")


def answer(given: argparse.Namespace) -> int:
    """Print the state of the stores; the exit code is 0 whatever it is."""
    from mmkv_bench.store.store import Store

    if given.watch is not None and (given.json or not given.watch > 0):
        raise ConfigError(f"--watch {given.watch:g} takes a number of seconds above 0, and no --json beside it")
    folders = given.rows or sorted(file.parent for file in RUNS.glob("**/store.json"))
    if not folders:
        raise ConfigError(f"there are no result rows below {RUNS}; name the rows folder that a run printed")
    stores = [Store(rows_folder(folder)) for folder in folders]
    while True:
        missing = _print(stores, given)
        if given.watch is None or not missing:
            return 0
        time.sleep(given.watch)


def _print(stores: Sequence[Store], given: argparse.Namespace) -> int:
    """Print the state once and return the number of missing answers."""
    from mmkv_bench.tables.status import failed_rows, status

    states = [(status(store), failed_rows(store) if given.failed else []) for store in stores]
    queue = jobs()
    ended_jobs = {} if queue is None else ended()
    if given.json:
        slurm = {"jobs": queue, "jobs_ended": ended_jobs}
        print(json.dumps([_document(one, failed, given.failed) | slurm for one, failed in states]))
    else:
        if given.watch is not None and sys.stdout.isatty():
            clear_screen()
        print("\n\n".join("\n".join(lines(one, failed)) for one, failed in states))
        if line := _slurm_line(queue, ended_jobs):
            print(line, file=sys.stderr if isinstance(queue, str) else sys.stdout)
        sys.stdout.flush()
    return sum(one.missing for one, _ in states)


def _slurm_line(queue: Mapping[str, int] | str | None, ended_jobs: Mapping[str, int]) -> str:
    if isinstance(queue, str):
        return queue
    parts = [_counts(queue or {}), f"ended within a day: {_counts(ended_jobs)}" if ended_jobs else ""]
    return f"Slurm: {'; '.join(filter(None, parts))}" if any(parts) else ""


def _counts(jobs: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {state.lower()}" for state, number in sorted(jobs.items()))


def _pace(status: Status) -> list[str]:
    """The writing processes, their rate, and the time left."""
    parts = []
    if status.writers:
        processes = f"{status.writers} process{'es' * (status.writers > 1)}"
        parts.append(f"{processes} writing, {status.running} cells running")
    if status.rate and (status.writers or status.missing):
        parts.append(f"{60 * status.rate:,.0f} answers a minute")
    if status.left:
        parts.append(f"about {_span(status.left)} left at that")
    elif status.missing and status.last is not None and not status.writers:
        parts.append(f"newest answer {_span(max(time.time() - status.last, 0))} ago")
    return [f"  {'; '.join(parts)}"] if parts else []


def _span(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def lines(status: Status, failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of one store: its folder, its datasets, its failures by kind, and the failed samples if asked for."""
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
    timed = sum(status.passes.values())
    passes = [f"  {timed} passes of scenario=efficiency, {timed - status.passes.get('ok', 0)} failed"] if timed else []
    if not rows and passes:
        return [f"{status.root}: no answers", *passes]
    done, planned = sum(one.rows for one in status.datasets), sum(one.planned for one in status.datasets)
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    table = [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEADS, *rows)
    ]
    ends = [
        f"  {number} {status} on {dataset}: {reason or 'no reason given'}"
        for (dataset, status, reason), number in status.failures.items()
    ]
    samples = [
        f"  {row['dataset']} {row['sample_id']} {row['label']}: {row['status']}, {row['error']}" for row in failed
    ]
    return [f"{status.root}: {done} of {planned} answers", *table, *_pace(status), *passes, *ends, *samples]


def _document(status: Status, failed: Sequence[Mapping[str, Any]], listed: bool) -> dict[str, Any]:
    failures = [
        {"dataset": dataset, "status": ended, "error": reason, "rows": number}
        for (dataset, ended, reason), number in status.failures.items()
    ]
    document = {
        "rows": str(status.root),
        "datasets": [asdict(one) for one in status.datasets],
        "failures": failures,
        "passes": dict(status.passes),
        "running": status.running,
        "writers": status.writers,
        "answers_per_second": status.rate,
        "seconds_left": status.left,
        "newest": status.last,
    }
    return document | ({"failed": list(failed)} if listed else {})

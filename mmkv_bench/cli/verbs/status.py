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
    """Which rows."""
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
    """Print what there is; 0 whatever it is."""
    from mmkv_bench.store.store import Store

    if given.watch is not None and (given.json or not given.watch > 0):
        raise ConfigError(f"--watch {given.watch:g} takes a number of seconds above 0, and no --json beside it")
    folders = given.rows or sorted(file.parent for file in RUNS.glob("**/store.json"))
    if not folders:
        raise ConfigError(f"there are no result rows below {RUNS}; name the rows folder that a run printed")
    stores = [Store(rows_folder(folder)) for folder in folders]
    while True:
        missing = _say(stores, given)
        if given.watch is None or not missing:
            return 0
        time.sleep(given.watch)


def _say(stores: Sequence[Store], given: argparse.Namespace) -> int:
    """Print it once; how many answers are missing."""
    from mmkv_bench.tables.status import failed_rows, status

    found = [(status(store), failed_rows(store) if given.failed else []) for store in stores]
    queue = jobs()
    gone = {} if queue is None else ended()
    if given.json:
        slurm = {"jobs": queue, "jobs_ended": gone}
        print(json.dumps([_document(one, failed, given.failed) | slurm for one, failed in found]))
    else:
        if given.watch is not None and sys.stdout.isatty():
            clear_screen()
        print("\n\n".join("\n".join(lines(one, failed)) for one, failed in found))
        if said := _queued(queue, gone):
            print(said, file=sys.stderr if isinstance(queue, str) else sys.stdout)
        sys.stdout.flush()
    return sum(one.missing for one, _ in found)


def _queued(queue: Mapping[str, int] | str | None, gone: Mapping[str, int]) -> str:
    if isinstance(queue, str):
        return queue
    said = [_states(queue or {}), f"ended within a day: {_states(gone)}" if gone else ""]
    return f"Slurm: {'; '.join(filter(None, said))}" if any(said) else ""


def _states(jobs: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {state.lower()}" for state, number in sorted(jobs.items()))


def _pace(status: Status) -> list[str]:
    """Who is at work, how fast, and how long it takes."""
    said = []
    if status.writers:
        processes = f"{status.writers} process{'es' * (status.writers > 1)}"
        said.append(f"{processes} writing, {status.running} cells running")
    if status.rate and (status.writers or status.missing):
        said.append(f"{60 * status.rate:,.0f} answers a minute")
    if status.left:
        said.append(f"about {_span(status.left)} left at that")
    elif status.missing and status.last is not None and not status.writers:
        said.append(f"newest answer {_span(max(time.time() - status.last, 0))} ago")
    return [f"  {'; '.join(said)}"] if said else []


def _span(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def lines(status: Status, failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """One store: its folder, a line per dataset, how failures ended, and the failed samples asked for."""
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

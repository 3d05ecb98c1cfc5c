"""`mmkv-bench status`: how far runs are, from their rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import Parser, rows_folder
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.tables.status import Status

SUMMARY = "how far runs are: cells, samples, failures and scores of their rows; works while they are written"

RUNS = Path("runs")
_HEADS = ("dataset", "cells", "samples", "answers", "complete", "failed", "scored")


def options(parser: Parser) -> None:
    """Which rows."""
    parser.add_argument("rows", type=Path, nargs="*", help=f"rows folders; all below {RUNS} by default")
    parser.add_argument("--failed", action="store_true", help="list the samples that failed, with the reason of each")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.examples("mmkv-bench status", "mmkv-bench status runs/demo --failed")


def answer(given: argparse.Namespace) -> int:
    """Print what there is; 0 whatever it is."""
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.status import failed_rows, status

    folders = given.rows or sorted(file.parent for file in RUNS.glob("**/store.json"))
    if not folders:
        raise ConfigError(f"there are no result rows below {RUNS}; name the rows folder that a run printed")
    stores = [Store(rows_folder(folder)) for folder in folders]
    found = [(status(store), failed_rows(store) if given.failed else []) for store in stores]
    if given.json:
        print(json.dumps([_document(one, failed, given.failed) for one, failed in found]))
    else:
        print("\n\n".join("\n".join(lines(one, failed)) for one, failed in found))
    return 0


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
    return [f"{status.root}: {done} of {planned} answers", *table, *passes, *ends, *samples]


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
    }
    return document | ({"failed": list(failed)} if listed else {})

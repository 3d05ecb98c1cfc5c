"""`mmkv-bench export`: rows in a form that others collect."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mmkv_bench.cli.grammar import Parser, rows_folder

SUMMARY = "write rows as records of Every Eval Ever: scores, intervals, budgets asked and counted, checksums"
FORMATS = ("eee",)
RELATIONSHIPS = ("first_party", "third_party", "collaborative", "other")


def options(parser: Parser) -> None:
    """Declare the format, the rows, the folder and who ran them."""
    parser.add_argument("format", choices=FORMATS, help="eee: Every Eval Ever, schema 0.3.0, a file per cell")
    parser.add_argument("rows", type=Path, nargs="+", help="rows folders that runs printed")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the folder data/ is made")
    parser.add_argument("--organization", required=True, metavar="NAME", help="who ran the evaluation")
    parser.add_argument(
        "--relationship",
        choices=RELATIONSHIPS,
        default="third_party",
        help="of who ran it to who made the model (default: third_party)",
    )
    parser.examples("mmkv-bench export eee results/tiny/large --out records --organization 'My lab'")


def answer(given: argparse.Namespace) -> int:
    """Write the records; say what has none."""
    from mmkv_bench.report.every_eval_ever import By, write
    from mmkv_bench.store.store import Store

    by = By(given.organization, given.relationship, int(time.time()))
    for folder in map(rows_folder, dict.fromkeys(given.rows)):
        files, left = write(Store(folder), by, given.out)
        print(f"{folder}: {len(files)} records in {given.out / 'data'}")
        if left:
            named = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
            print(f"{len(left)} cells have no record, because none of their metrics has a value: {named}")
    return 0

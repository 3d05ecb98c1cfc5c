"""`mmkv-bench report`: rows as pages that open in a browser, offline."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmkv_bench.cli.grammar import Parser, count, rows_folder

SUMMARY = "make pages of rows that a browser opens offline: overview, table, cells, samples"
SAMPLES = 50


def options(parser: Parser) -> None:
    """Declare the rows, the folder, and the number of samples."""
    parser.add_argument("rows", type=Path, nargs="+", help="rows folders that runs printed")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a new folder, or that of an earlier report, which is replaced",
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=SAMPLES,
        metavar="N",
        help=f"of each dataset, the first ones, with answers and images (default: {SAMPLES})",
    )
    parser.examples(
        "mmkv-bench report runs/demo --out report",
        "mmkv-bench report results/tiny/large results/tiny/methods --out report --samples 20",
    )


def answer(given: argparse.Namespace) -> int:
    """Make the report; print its page, its size and what it leaves out."""
    from mmkv_bench.report.build import build_report

    report = build_report([rows_folder(rows) for rows in dict.fromkeys(given.rows)], given.out, given.samples)
    print(f"{report.index}: {report.about}")
    print(report.size)
    for sentence in report.left_out:
        print(sentence)
    return 0

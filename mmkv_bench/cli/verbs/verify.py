"""`mmkv-bench verify`: make a random draw of stored answers again and compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmkv_bench.cli.grammar import Parser, count, not_negative, rows_folder
from mmkv_bench.consent import RUN_CODE

SUMMARY = "make a random draw of stored answers again and compare text, token ids and what was kept"

RESULTS = Path("results/tiny")


def options(parser: Parser) -> None:
    """Declare the rows, the number of answers and the draw."""
    parser.add_argument("rows", type=Path, nargs="*", help=f"folders of rows; all below {RESULTS} by default")
    parser.add_argument(
        "--samples", type=count, default=50, metavar="K", help="answers to draw, evenly from the folders (default: 50)"
    )
    parser.add_argument("--seed", type=not_negative, default=0, metavar="S", help="of the draw (default: 0)")
    parser.add_argument(
        "--other-versions", action="store_true", help="also rows of other torch or transformers than the installed ones"
    )
    parser.add_argument(
        RUN_CODE, action="store_true", help="run the method files that the rows name, if their content is the rows'"
    )
    parser.examples("mmkv-bench verify results/tiny/large --samples 20 --seed 3")


def answer(given: argparse.Namespace) -> int:
    """0 all equal, 1 some answer differs, 2 nothing could be made again."""
    from mmkv_bench.diagnostics.verify import exit_code, lines, receipt, verify

    roots = given.rows or with_answers(RESULTS)
    drawn = verify(
        [rows_folder(root) for root in roots], given.samples, given.seed, given.other_versions, given.run_code
    )
    print("\n".join([*lines(drawn), receipt(drawn, given.seed)]))
    return exit_code(drawn)


def with_answers(folder: Path) -> list[Path]:
    """The stores below a folder that hold answers: others hold passes or diagnostics alone, which are not made again."""
    return sorted(file.parent for file in folder.glob("*/store.json") if any(file.parent.glob("responses/*.parquet")))

"""`mmkv-bench plot`: pictures of rows."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from mmkv_bench.cli.grammar import Parser, count, rows_folder
from mmkv_bench.cli.verbs.measure import ANALYSES
from mmkv_bench.errors import ConfigError


def plot_options(parser: Parser) -> None:
    """Add the kind of picture, rows, filters and the file."""
    parser.add_argument(
        "kind",
        choices=("budget", "length", "front", "removal", "position", *ANALYSES),
        help="budget: scores against the budget; length: a cost against the length of the prompt, with the roofline where the "
        "device was measured; front: scores against costs, one point a cell, the Pareto front drawn; removal: scores against "
        "the share of entries that FlashCache removed; position: fidelity against the token of a continuation; others: the "
        "diagnostic of that name, as its paper's figure has it",
    )
    parser.add_argument(
        "rows",
        type=rows_folder,
        help="rows folder that a run printed; of scores, for `length` of efficiency, of diagnostics",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="without suffix; makes PATH.png and PATH.svg"
    )
    parser.add_argument("--metric", metavar="NAME", help="the score; needed where the rows hold several")
    parser.lists(
        {
            "dataset": "only these datasets, one panel each",
            "protocol": "only these protocols; default: paper",
            "reading": "only these readings",
            "methods": "(budget, front, removal, position) only these lines",
            "budgets": "only budgets of a kind, entries or fraction; or (budget, front, removal, position) only these, as 64,128",
            "cost": "what costs are drawn, as for `tables --metric`; default: tpot_s (length), bytes,tpot_s (front)",
        }
    )
    parser.add_argument(
        "--costs",
        type=rows_folder,
        metavar="ROWS",
        help="(front) rows of scenario=efficiency, where they are in another folder",
    )
    parser.add_argument("--tokens", type=count, metavar="N", help="(front) passes of this prompt length")
    parser.add_argument("--batch", type=count, metavar="N", help="(front) passes of this batch")
    parser.add_argument("--prompts", choices=("text", "image", "video"), help="(front) passes of this kind of prompts")
    parser.add_argument(
        "--name", action="append", metavar="LINE=NAME", help="print another name for a line: --name mine=Ours"
    )
    parser.examples(
        "mmkv-bench plot budget results/tiny/large --out large",
        "mmkv-bench plot budget results/tiny/large --methods snapkv,mmshift --budgets 64,128,256 --out two",
        "mmkv-bench plot length runs/speed --out latency",
        "mmkv-bench plot front runs/demo --costs runs/speed --tokens 512 --out front",
        "mmkv-bench plot lorenz runs/figures --out lorenz",
    )


def plot(given: argparse.Namespace) -> int:
    """Draw the picture, print the files' names and what is left out of it."""
    from mmkv_bench.api.pictures import PlotRequest, draw
    from mmkv_bench.tables.figure import save

    options = {field.name: getattr(given, field.name) for field in fields(PlotRequest)}
    stem = _stem(given.out)
    figure, left_out = draw(PlotRequest(**options))
    for line in [*save(figure, stem), *left_out]:
        print(line)
    return 0


def _stem(path: Path) -> Path:
    """The path without `.png` or `.svg`, of which both are made; other kinds of picture are refused."""
    if path.suffix.lower() in (".pdf", ".jpg", ".jpeg", ".eps"):
        raise ConfigError(
            f"--out {path}: pictures are PNG and SVG; write --out {path.with_suffix('')}, which makes both"
        )
    return path.with_suffix("") if path.suffix.lower() in (".png", ".svg") else path

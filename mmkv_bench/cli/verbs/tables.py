"""`mmkv-bench tables`: the tables of a run again, from its rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmkv_bench.cli.grammar import Listed, Parser
from mmkv_bench.errors import ConfigError

SUMMARY = "print the tables of a run again, from its rows"


def options(parser: Parser) -> None:
    """Which rows, which tables, in which form."""
    parser.add_argument("rows", type=Path, help="rows folder that a run printed")
    parser.add_argument("--format", choices=("md", "csv", "latex"), default="md", help="default: md")
    parser.add_argument("--dataset", action=Listed, metavar="NAMES", help="only these datasets")
    parser.add_argument("--protocol", action=Listed, metavar="NAMES", help="only these protocols")
    parser.add_argument("--reading", action=Listed, metavar="NAMES", help="only these readings (paper, released)")
    parser.add_argument(
        "--metric",
        "--metrics",
        action=Listed,
        metavar="NAMES",
        help="only these metrics; fidelity: KL, agreement and divergence from full in one table",
    )
    parser.add_argument("--groups", action="store_true", help="means over the groups of a benchmark's datasets (md)")
    parser.add_argument("--no-interval", action="store_true", help="scores without their intervals (md, latex)")
    parser.add_argument("--pairs", action="store_true", help="also the separated pairs (csv: all pairs, instead)")
    parser.examples(
        "mmkv-bench tables results/tiny/large",
        "mmkv-bench tables runs/demo --protocol strict --format latex",
        "mmkv-bench tables results/tiny/ablations --metric fidelity",
    )


def answer(given: argparse.Namespace) -> int:
    """Print them."""
    sys.stdout.write(text(given))
    return 0


def text(given: argparse.Namespace) -> str:
    """The text that the options ask for."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.fidelity import GROUP, fidelity_markdown, names
    from mmkv_bench.tables.latex import latex
    from mmkv_bench.tables.macro import gate_configs, group_markdown, group_tables, groups_of
    from mmkv_bench.tables.raw import csv_cells, csv_pairs
    from mmkv_bench.tables.render import markdown
    from mmkv_bench.tables.rows import load

    rows = load(given.rows)
    if given.metric == [GROUP] and given.format == "md":
        return fidelity_markdown(rows, given.dataset, given.protocol, given.reading)
    tables = build(
        rows,
        datasets=given.dataset,
        protocols=given.protocol,
        readings=given.reading,
        metrics=names(given.metric, rows),
    )
    if given.groups:
        if given.format != "md":
            raise ConfigError(f"--groups prints markdown, not {given.format}; leave out --format")
        means = group_tables(tables, groups_of(rows), gate_configs(rows))
        return group_markdown(means, intervals=not given.no_interval)
    if given.format == "csv":
        return csv_pairs(tables) if given.pairs else csv_cells(tables)
    write = markdown if given.format == "md" else latex
    return write(tables, intervals=not given.no_interval, pairs=given.pairs)

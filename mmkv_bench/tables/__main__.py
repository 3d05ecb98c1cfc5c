"""`python -m mmkv_bench.tables <rows folder>`: prints the tables of a run again from its rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.errors import ConfigError, MMKVError, check_output


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    command = argparse.ArgumentParser(prog="python -m mmkv_bench.tables", description="Print tables from result rows.")
    command.add_argument("rows", type=Path, help="rows folder that a run printed")
    command.add_argument("--format", choices=("md", "csv", "latex"), default="md", help="default: md")
    command.add_argument("--dataset", nargs="+", action="extend", help="only these datasets")
    command.add_argument("--protocol", nargs="+", action="extend", help="only these protocols")
    command.add_argument("--reading", nargs="+", action="extend", help="only these readings (paper, released)")
    command.add_argument(
        "--metric",
        "--metrics",
        nargs="+",
        action="extend",
        help="only these metrics; fidelity: KL, agreement and divergence from full in one table",
    )
    command.add_argument("--groups", action="store_true", help="means over the groups of a benchmark's datasets (md)")
    command.add_argument("--no-interval", action="store_true", help="scores without their intervals (md, latex)")
    command.add_argument("--pairs", action="store_true", help="also the separated pairs (csv: all pairs, instead)")
    return command


def render(arguments: argparse.Namespace) -> str:
    """The text that the options ask for."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.fidelity import GROUP, fidelity_markdown, names
    from mmkv_bench.tables.latex import latex
    from mmkv_bench.tables.macro import gate_configs, group_markdown, group_tables, groups_of
    from mmkv_bench.tables.raw import csv_cells, csv_pairs
    from mmkv_bench.tables.render import markdown
    from mmkv_bench.tables.rows import load

    rows = load(arguments.rows)
    if arguments.metric == [GROUP] and arguments.format == "md":
        return fidelity_markdown(rows, arguments.dataset, arguments.protocol, arguments.reading)
    tables = build(
        rows,
        datasets=arguments.dataset,
        protocols=arguments.protocol,
        readings=arguments.reading,
        metrics=names(arguments.metric, rows),
    )
    if arguments.groups:
        if arguments.format != "md":
            raise ConfigError(f"--groups prints markdown, not {arguments.format}; leave out --format")
        means = group_tables(tables, groups_of(rows), gate_configs(rows))
        return group_markdown(means, intervals=not arguments.no_interval)
    if arguments.format == "csv":
        return csv_pairs(tables) if arguments.pairs else csv_cells(tables)
    write = markdown if arguments.format == "md" else latex
    return write(tables, intervals=not arguments.no_interval, pairs=arguments.pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own (2 for a folder without scored rows or a filter that matches nothing)."""
    try:
        check_output()
        sys.stdout.write(render(parser().parse_args(argv)))
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

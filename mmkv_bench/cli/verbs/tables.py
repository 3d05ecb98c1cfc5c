"""`mmkv-bench tables`: the tables of a run again, from its rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Listed, Parser
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.tables.cost_names import Cost

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
        help="only these metrics; fidelity: KL, agreement and divergence from full in one table; costs, with the ratio to full: "
        "tpot_s,ttft_s,peak,bytes, and each column of responses and phase of timings (docs/rows.md)",
    )
    parser.add_argument(
        "--methods", action=Listed, metavar="NAMES", help="only these lines, each two of them compared (md)"
    )
    parser.add_argument("--budgets", action=Listed, metavar="NUMBERS", help="only these budgets")
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="compare the lines with this one only; bold, ranks and verdicts stay those of all lines of the rows",
    )
    parser.add_argument("--groups", action="store_true", help="means over the groups of a benchmark's datasets (md)")
    parser.add_argument("--ranks", action="store_true", help="ranks over all tasks, in place of the tables (md)")
    parser.add_argument("--no-interval", action="store_true", help="scores without their intervals (md, latex)")
    parser.add_argument("--pairs", action="store_true", help="also the separated pairs (csv: all pairs, instead)")
    parser.examples(
        "mmkv-bench tables results/tiny/large",
        "mmkv-bench tables runs/demo --protocol strict --format latex",
        "mmkv-bench tables results/tiny/large --methods snapkv,keydiff --budgets 64,128 --against mmshift",
        "mmkv-bench tables results/tiny/methods --ranks",
        "mmkv-bench tables results/tiny/ablations --metric fidelity",
        "mmkv-bench tables runs/speed --metric tpot_s,ttft_s,peak,bytes",
    )


def answer(given: argparse.Namespace) -> int:
    """Print them."""
    sys.stdout.write(text(given))
    return 0


def text(given: argparse.Namespace) -> str:
    """The text that the options ask for: tables of scores, then those of costs."""
    from mmkv_bench.tables.cost_names import divided

    names, costs = divided(given.metric or ())
    if not costs:
        return _scores(given, given.metric)
    for name in ("groups", "pairs", "ranks", "methods", "budgets", "against"):
        if getattr(given, name):
            raise ConfigError(f"--{name} is for scores; leave out --metric {costs[0].name}")
    if names and given.format == "csv":
        raise ConfigError(
            f"scores ({', '.join(names)}) and costs ({', '.join(cost.name for cost in costs)}) have other columns in csv; "
            "ask for them in two commands"
        )
    before = [_scores(given, names)] if names else []
    return "\n".join([*before, _costs(given, costs)])


def _costs(given: argparse.Namespace, costs: Sequence[Cost]) -> str:
    from mmkv_bench.tables.cost_text import cost_csv, cost_latex, cost_markdown
    from mmkv_bench.tables.costs import cost_tables

    tables = cost_tables(given.rows, costs, datasets=given.dataset, protocols=given.protocol, readings=given.reading)
    if given.format == "csv":
        return cost_csv(tables)
    write = cost_markdown if given.format == "md" else cost_latex
    return write(tables, intervals=not given.no_interval)


def _refuse_unheard(given: argparse.Namespace, together: str) -> None:
    """Options that would change nothing of what is printed. together: the metrics of fidelity where one table has them all.

    Raises ConfigError.
    """
    for name in ("groups", "ranks", "against"):
        if getattr(given, name) and given.format != "md":
            raise ConfigError(f"--{name} prints markdown, not {given.format}; leave out --format")
    if given.groups and given.ranks:
        raise ConfigError("--groups and --ranks print two things; ask for them in two commands")
    for name in ("groups", "ranks", "pairs", "methods", "budgets", "against"):
        if together and getattr(given, name):
            raise ConfigError(f"--{name} is for tables of one metric; give --metric one or more of {together}")


def _scores(given: argparse.Namespace, metrics: Sequence[str] | None) -> str:
    from mmkv_bench.tables.asked import narrowed
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.cost_names import refuse_unknown
    from mmkv_bench.tables.fidelity import GROUP, among, fidelity_markdown, names
    from mmkv_bench.tables.latex import latex
    from mmkv_bench.tables.macro import gate_configs, group_markdown, group_tables, groups_of
    from mmkv_bench.tables.raw import csv_cells, csv_pairs
    from mmkv_bench.tables.render import markdown
    from mmkv_bench.tables.rows import load
    from mmkv_bench.tables.task_ranks import ranks_markdown

    together = metrics == [GROUP] and given.format == "md"
    _refuse_unheard(given, ", ".join(sorted(among([GROUP]))) if together else "")
    rows = load(given.rows, fidelity=among(metrics or ()))
    if together:
        return fidelity_markdown(rows, given.dataset, given.protocol, given.reading)
    wanted = names(metrics, rows)
    refuse_unknown(wanted or (), rows.names)
    tables = build(rows, datasets=given.dataset, protocols=given.protocol, readings=given.reading, metrics=wanted)
    compare = bool(given.methods or given.against)
    if compare or given.budgets:
        tables = narrowed(tables, given.methods, given.budgets, given.against)
    if given.ranks:
        return ranks_markdown(tables)
    if given.groups:
        means = group_tables(tables, groups_of(rows), gate_configs(rows))
        return group_markdown(means, intervals=not given.no_interval)
    if given.format == "csv":
        return csv_pairs(tables) if given.pairs else csv_cells(tables)
    if given.format == "latex":
        return latex(tables, intervals=not given.no_interval, pairs=given.pairs)
    return markdown(tables, intervals=not given.no_interval, pairs=given.pairs, compare=compare, against=given.against)

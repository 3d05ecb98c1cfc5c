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
    from mmkv_bench.tables.rows import Rows
    from mmkv_bench.tables.score_table import ScoreTable
    from mmkv_bench.tables.table import Table

SUMMARY = "print the tables of a run again, from its rows"


def options(parser: Parser) -> None:
    """Add rows, filters and forms."""
    parser.add_argument("rows", type=Path, help="rows folder that a run printed")
    parser.add_argument("--format", choices=("md", "csv", "latex", "html"), default="md", help="default: md")
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
        "--methods", action=Listed, metavar="NAMES", help="only these lines, each two of them compared (not csv)"
    )
    parser.add_argument("--budgets", action=Listed, metavar="NUMBERS", help="only these budgets")
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="compare the lines with this one only; bold, ranks and verdicts stay those of all lines of the rows",
    )
    parser.add_argument(
        "--groups", action="store_true", help="means over the groups of a benchmark's datasets (not csv)"
    )
    parser.add_argument("--ranks", action="store_true", help="ranks over all tasks, in place of the tables (not csv)")
    parser.add_argument("--no-interval", action="store_true", help="scores without their intervals (not csv)")
    parser.add_argument("--notes", action="store_true", help="all notes, not only the five most important (not csv)")
    parser.add_argument("--pairs", action="store_true", help="also the separated pairs (csv: all pairs, instead)")
    parser.examples(
        "mmkv-bench tables results/tiny/large",
        "mmkv-bench tables runs/demo --protocol strict --format latex",
        "mmkv-bench tables results/tiny/large --methods snapkv,keydiff --budgets 64,128 --against mmshift",
        "mmkv-bench tables results/tiny/methods --ranks",
        "mmkv-bench tables results/tiny/methods --format html > tables.html",
        "mmkv-bench tables results/tiny/ablations --metric fidelity",
        "mmkv-bench tables runs/speed --metric tpot_s,ttft_s,peak,bytes",
    )


def answer(given: argparse.Namespace) -> int:
    """Print the tables."""
    sys.stdout.write(text(given))
    return 0


def text(given: argparse.Namespace) -> str:
    """The text that the options ask for: tables of scores, then those of costs."""
    from mmkv_bench.tables.cost_names import divided
    from mmkv_bench.tables.formats import write

    names, costs = divided(given.metric or ())
    _refuse_conflicts(given, names, costs)
    tables = _score_tables(given, names) if names or not costs else []
    tables += _cost_tables(given, costs) if costs else []
    return write(tables, given.format, title=f"Tables of {given.rows}", notes=given.notes)


def _refuse_conflicts(given: argparse.Namespace, names: Sequence[str], costs: Sequence[Cost]) -> None:
    """Raise ConfigError for options that would change nothing of what is printed, and for what no format prints together."""
    from mmkv_bench.tables.fidelity import GROUP, among

    if costs:
        for name in ("groups", "pairs", "ranks", "methods", "budgets", "against"):
            if getattr(given, name):
                raise ConfigError(f"--{name} is for scores; leave out --metric {costs[0].name}")
    if names and costs and given.format == "csv":
        raise ConfigError(
            f"scores ({', '.join(names)}) and costs ({', '.join(cost.name for cost in costs)}) have other columns in csv; "
            "ask for them in two commands"
        )
    for name in ("groups", "ranks", "against"):
        if getattr(given, name) and given.format == "csv":
            raise ConfigError(f"--{name} is for tables to read, not for csv; leave out --format csv")
    if given.groups and given.ranks:
        raise ConfigError("--groups and --ranks print two things; ask for them in two commands")
    for name in ("groups", "ranks", "pairs", "methods", "budgets", "against"):
        if _together(given, names) and getattr(given, name):
            one = ", ".join(sorted(among([GROUP])))
            raise ConfigError(f"--{name} is for tables of one metric; give --metric one or more of {one}")


def _together(given: argparse.Namespace, names: Sequence[str]) -> bool:
    """True if all metrics of fidelity stand in one table."""
    from mmkv_bench.tables.fidelity import GROUP

    return list(names) == [GROUP] and given.format != "csv"


def _score_tables(given: argparse.Namespace, names: Sequence[str]) -> list[Table]:
    from mmkv_bench.tables.dataset_groups import gate_configs, group_tables, groups_of, tables_of_groups
    from mmkv_bench.tables.fidelity import fidelity_tables
    from mmkv_bench.tables.score_text import tables_of_scores
    from mmkv_bench.tables.task_ranks import tables_of_ranks

    if _together(given, names):
        return fidelity_tables(_rows(given, names), given.dataset, given.protocol, given.reading)
    rows, tables = _tables(given, names)
    intervals = not given.no_interval
    if given.ranks:
        return tables_of_ranks(tables)
    if given.groups:
        return tables_of_groups(group_tables(tables, groups_of(rows), gate_configs(rows)), intervals=intervals)
    compare = bool(given.methods or given.against)
    return tables_of_scores(tables, intervals=intervals, pairs=given.pairs, compare=compare, against=given.against)


def _cost_tables(given: argparse.Namespace, costs: Sequence[Cost]) -> list[Table]:
    from mmkv_bench.forecast.roofline import roofline_by_context
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.cost_text import tables_of_costs
    from mmkv_bench.tables.costs import cost_tables, needed, set_limits

    filters = {"datasets": given.dataset, "protocols": given.protocol, "readings": given.reading}
    tables = set_limits(
        cost_tables(given.rows, costs, beside=needed(costs), **filters), costs, roofline_by_context(Store(given.rows))
    )
    return tables_of_costs(tables, intervals=not given.no_interval)


def _rows(given: argparse.Namespace, names: Sequence[str]) -> Rows:
    from mmkv_bench.tables.fidelity import among
    from mmkv_bench.tables.rows import load

    return load(given.rows, fidelity=among(names))


def _tables(given: argparse.Namespace, metrics: Sequence[str]) -> tuple[Rows, list[ScoreTable]]:
    """The rows, and the tables of scores that are wanted of them."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.compare import narrowed
    from mmkv_bench.tables.cost_names import refuse_unknown
    from mmkv_bench.tables.fidelity import names

    rows = _rows(given, metrics)
    wanted = names(metrics or None, rows)
    refuse_unknown(wanted or (), rows.names)
    tables = build(rows, datasets=given.dataset, protocols=given.protocol, readings=given.reading, metrics=wanted)
    if given.methods or given.against or given.budgets:
        tables = narrowed(tables, given.methods, given.budgets, given.against)
    return rows, tables

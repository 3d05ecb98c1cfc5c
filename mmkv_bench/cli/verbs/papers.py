"""`mmkv-bench papers`: the papers' tables, filled from result rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Listed, Parser, amount
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.papers.filled_table import FilledTable
    from mmkv_bench.papers.layout import TableLayout

STAND_INS = "standins"
SUMMARY = "print the papers' tables, measured beside printed, each cell with its verdict or the command that runs it"


def options(parser: Parser) -> None:
    """Add the options: tables, rows and format."""
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="id",
        help="as mmshift_table01 or meda_fig04; all; standins: every layout, filled by the embedded model",
    )
    parser.add_argument(
        "--rows",
        action=Listed,
        metavar="DIRS",
        help="rows folders that runs printed, or folders that hold such; default: results/papers if it exists",
    )
    parser.add_argument("--format", choices=("md", "latex", "csv", "html"), default="md", help="default: md")
    parser.add_argument("--notes", action="store_true", help="print all notes, not the five most important")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a file for each table there, and its pictures")
    parser.add_argument("--list", action="store_true", help="list the ids with their captions")
    parser.add_argument("--plan", action="store_true", help="print what the cells take to run, in hours; run nothing")
    parser.add_argument(
        "--bandwidth", type=amount, default=3350, metavar="GB/S", help="with --plan: default 3350, an H100"
    )
    parser.add_argument("--matmul", type=amount, default=400, metavar="TFLOP/S", help="with --plan: default 400")
    parser.add_argument("--summary", action="store_true", help="print all papers as one page (md)")
    parser.examples(
        "mmkv-bench papers mmshift_table01",
        "mmkv-bench papers mmshift_table06 flashcache_table05 --rows runs/qwen,runs/other_machine",
        "mmkv-bench papers all --rows results/papers --format csv",
        "mmkv-bench papers mmshift_table01 --plan",
        "mmkv-bench papers --summary",
        "mmkv-bench papers standins --out results/tiny/papers",
    )


def answer(given: argparse.Namespace) -> int:
    """Print tables, or write them and print their files' names."""
    if given.out is None or given.list or given.summary or given.plan:
        sys.stdout.write(text(given))
        return 0
    from mmkv_bench.papers.figure import save_pictures
    from mmkv_bench.papers.table import SUFFIXES, render

    given.out.mkdir(parents=True, exist_ok=True)
    for table in _filled(given):
        file = given.out / f"{table.layout.id}.{SUFFIXES[given.format]}"
        file.write_text(render([table], given.format, notes=given.notes), encoding="utf-8")
        for path in (file, *save_pictures(table, given.out)):
            print(path)
    return 0


def text(given: argparse.Namespace) -> str:
    """Return the text that the options ask for."""
    from mmkv_bench.papers import plan
    from mmkv_bench.papers.layout import load, stand_in_ids, table_ids
    from mmkv_bench.papers.summary import summary
    from mmkv_bench.papers.table import render

    if given.list:
        return "".join(f"{name:<24}{load(name).caption}\n" for name in (*table_ids(), *stand_in_ids()))
    if given.plan:
        return plan.text(_layouts(given), plan.PlanDevice(given.bandwidth * 1e9, given.matmul * 1e12))
    return summary(_filled(given)) if given.summary else render(_filled(given), given.format, notes=given.notes)


def _layouts(given: argparse.Namespace) -> list[TableLayout]:
    from mmkv_bench.papers.layout import load, stand_in_ids, table_ids

    if not given.tables and not given.summary:
        raise ConfigError("papers needs the id of a table, all, or standins; --list names them")
    groups = {"all": table_ids(), STAND_INS: stand_in_ids()}
    names = groups["all"] if given.summary else [one for name in given.tables for one in groups.get(name, (name,))]
    return [load(name) for name in dict.fromkeys(names)]


def _filled(given: argparse.Namespace) -> list[FilledTable]:
    """Fill the tables; stand-ins name their own rows unless --rows does."""
    from mmkv_bench.config.schema import conf_dir
    from mmkv_bench.papers.evidence import Evidence
    from mmkv_bench.papers.filled_table import fill

    results = conf_dir().parent / "results"
    default = [results / "papers"] if (results / "papers").is_dir() else []
    bodies: dict[tuple[bool, tuple[Path, ...]], Evidence] = {}
    tables = []
    for layout in _layouts(given):
        roots = [Path(root) for root in given.rows or ()] or [results / "tiny" / store for store in layout.stores]
        key = (bool(layout.stands_for), tuple(roots or default))
        if key not in bodies:
            bodies[key] = Evidence.of(key[1], stand_in=key[0])
        tables.append(fill(layout, bodies[key]))
    return tables

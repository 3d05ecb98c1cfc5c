"""`mmkv-bench papers`: the papers' tables with what rows hold for them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
    """Which tables, from which rows, in which form."""
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="id",
        help="as mmshift_table01 or meda_fig04; all: every one of them; standins: every layout, filled by the embedded model",
    )
    parser.add_argument(
        "--rows",
        action=Listed,
        metavar="DIRS",
        help="rows folders that runs printed, or folders that hold such; default: results/papers where it is there",
    )
    parser.add_argument("--format", choices=("md", "latex", "csv", "html"), default="md", help="default: md")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a file for each table there, and the pictures of figures that have numbers",
    )
    parser.add_argument("--list", action="store_true", help="the ids with their captions")
    parser.add_argument(
        "--plan", action="store_true", help="what exactly their cells take to run, in hours; runs nothing"
    )
    parser.add_argument(
        "--bandwidth", type=amount, default=3350, metavar="GB/S", help="with --plan: default 3350, an H100"
    )
    parser.add_argument("--matmul", type=amount, default=400, metavar="TFLOP/S", help="with --plan: default 400")
    parser.add_argument("--summary", action="store_true", help="all papers on one page, docs/reproducibility.md (md)")
    parser.examples(
        "mmkv-bench papers mmshift_table01",
        "mmkv-bench papers mmshift_table06 flashcache_table05 --rows runs/qwen,runs/other_machine",
        "mmkv-bench papers all --rows results/papers --format csv",
        "mmkv-bench papers mmshift_table01 --plan",
        "mmkv-bench papers --summary",
        "mmkv-bench papers standins --out results/tiny/papers",
    )


def answer(given: argparse.Namespace) -> int:
    """Print them, or write them and print the files' names."""
    if given.out is None or given.list or given.summary or given.plan:
        sys.stdout.write(text(given))
        return 0
    from mmkv_bench.papers.formats import SUFFIXES, render

    given.out.mkdir(parents=True, exist_ok=True)
    for page in _pages(given):
        file = given.out / f"{page.spec.id}.{SUFFIXES[given.format]}"
        file.write_text(render([page], given.format), encoding="utf-8")
        for path in (file, *_pictures(page, given.out)):
            print(path)
    return 0


def text(given: argparse.Namespace) -> str:
    """The text that the options ask for."""
    from mmkv_bench.papers.formats import render
    from mmkv_bench.papers.layout import load, stand_in_ids, table_ids

    if given.list:
        return "".join(f"{name:<24}{load(name).caption}\n" for name in (*table_ids(), *stand_in_ids()))
    if given.plan:
        from mmkv_bench.papers import plan

        return plan.text(_specs(given), plan.PlanDevice(given.bandwidth * 1e9, given.matmul * 1e12))
    if given.summary:
        from mmkv_bench.papers.summary import summary

        return summary(_pages(given))
    return render(_pages(given), given.format)


def _specs(given: argparse.Namespace) -> list[TableLayout]:
    """The tables that are asked for."""
    from mmkv_bench.papers.layout import load, stand_in_ids, table_ids

    if not given.tables and not given.summary:
        raise ConfigError("papers needs the id of a table, all, or standins; --list names them")
    groups = {"all": table_ids(), STAND_INS: stand_in_ids()}
    names = groups["all"] if given.summary else [one for name in given.tables for one in groups.get(name, (name,))]
    return [load(name) for name in dict.fromkeys(names)]


def _pages(given: argparse.Namespace) -> list[FilledTable]:
    """The same, filled."""
    from mmkv_bench.papers.evidence import Evidence
    from mmkv_bench.papers.filled_table import fill

    bodies: dict[tuple[bool, tuple[Path, ...]], Evidence] = {}
    pages = []
    for spec in _specs(given):
        key = (bool(spec.stands_for), tuple(_roots(spec, given.rows or ())))
        if key not in bodies:
            bodies[key] = Evidence.of(key[1], stand_in=key[0])
        pages.append(fill(spec, bodies[key]))
    return pages


def _roots(spec: TableLayout, rows: Sequence[str]) -> list[Path]:
    """Where a table's rows lie unless it is said: a stand-in names its own."""
    from mmkv_bench.config.schema import conf_dir

    results = conf_dir().parent / "results"
    if rows:
        return [Path(root) for root in rows]
    if spec.stores:
        return [results / "tiny" / store for store in spec.stores]
    return [results / "papers"] if (results / "papers").is_dir() else []


def _pictures(page: FilledTable, folder: Path) -> list[Path]:
    from mmkv_bench.papers.figure import drawable, pictures

    if not drawable(page):
        return []
    from mmkv_bench.tables.figure import save

    plain = bool(page.spec.stands_for)
    drawn = pictures(page).items()
    return [path for name, figure in drawn for path in save(figure, folder / f"{page.spec.id}{name}", plain=plain)]

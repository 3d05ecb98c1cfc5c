"""`mmkv-bench papers`: the papers' tables with what rows hold for them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmkv_bench.cli.grammar import Listed, Parser
from mmkv_bench.errors import ConfigError

SUMMARY = "print the papers' tables, measured beside printed, each cell with its verdict or the command that runs it"


def options(parser: Parser) -> None:
    """Which tables, from which rows, in which form."""
    parser.add_argument(
        "tables", nargs="*", metavar="id", help="as mmshift_table01 or meda_fig04; all: every one of them"
    )
    parser.add_argument(
        "--rows",
        action=Listed,
        metavar="DIRS",
        help="rows folders that runs printed, or folders that hold such; default: results/papers where it is there",
    )
    parser.add_argument("--format", choices=("md", "latex", "csv", "html"), default="md", help="default: md")
    parser.add_argument("--list", action="store_true", help="the ids with their captions")
    parser.add_argument("--summary", action="store_true", help="all papers on one page, docs/reproducibility.md (md)")
    parser.examples(
        "mmkv-bench papers mmshift_table01",
        "mmkv-bench papers mmshift_table06 flashcache_table05 --rows runs/qwen,runs/other_machine",
        "mmkv-bench papers all --rows results/papers --format csv",
        "mmkv-bench papers --summary",
    )


def answer(given: argparse.Namespace) -> int:
    """Print them."""
    sys.stdout.write(text(given))
    return 0


def text(given: argparse.Namespace) -> str:
    """The text that the options ask for."""
    from mmkv_bench.config.schema import conf_dir
    from mmkv_bench.papers.fill import fill
    from mmkv_bench.papers.match import Evidence
    from mmkv_bench.papers.page import render
    from mmkv_bench.papers.spec import load, table_ids

    if given.list:
        return "".join(f"{name:<20}{load(name).caption}\n" for name in table_ids())
    if not given.tables and not given.summary:
        raise ConfigError("papers needs the id of a table, or all; --list names them")
    names = table_ids() if given.summary or "all" in given.tables else given.tables
    specs = [load(name) for name in dict.fromkeys(names)]
    usual = conf_dir().parent / "results" / "papers"
    roots = [Path(root) for root in given.rows or ([str(usual)] if usual.is_dir() else [])]
    evidence = Evidence.of(roots)
    pages = [fill(spec, evidence) for spec in specs]
    if given.summary:
        from mmkv_bench.papers.summary import summary

        return summary(pages)
    return render(pages, given.format)

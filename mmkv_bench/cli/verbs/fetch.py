"""`mmkv-bench fetch`: published rows to this machine, checked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmkv_bench.cli.grammar import Parser

SUMMARY = "fetch published rows from a folder, a web server or the hub; every file is checked before it is kept"


def options(parser: Parser) -> None:
    """From where, to where."""
    parser.add_argument(
        "source",
        help="what `mmkv-bench pack --publish` made: a folder, https://..., or hf://datasets/<owner>/<name>[@revision][/folder]",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows; what is there and right stays")
    parser.add_argument(
        "--sha256",
        help="checksum of the manifest, as `pack --publish` printed it: then every byte of the rows is known by it",
    )
    parser.examples(
        "mmkv-bench fetch hf://datasets/<owner>/<name>@v1 --out runs/published",
        "mmkv-bench tables runs/published",
    )


def answer(given: argparse.Namespace) -> int:
    """Fetch, open what was fetched, and say what it is."""
    from mmkv_bench.store.publish import fetch, place
    from mmkv_bench.store.store import Store

    fetched, there = fetch(place(given.source), given.out, given.sha256, lambda line: print(line, file=sys.stderr))
    cells = Store(given.out).cells().num_rows
    print(f"{given.out}: {cells} cells in {fetched + there} files, {fetched} fetched, {there} there already")
    print(f"mmkv-bench tables {given.out} prints their tables")
    return 0

"""`mmkv-bench pack`: the rows of a finished run as few files."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmkv_bench.cli.grammar import Parser, rows_folder
from mmkv_bench.errors import ConfigError

SUMMARY = "write the rows of a finished run as few files, each below 10 MB, with checksums; in place"


def options(parser: Parser) -> None:
    """Flags for the rows, and for packing for git."""
    parser.add_argument("rows", type=Path, nargs="+", help="rows folder that a run printed")
    parser.add_argument(
        "--slim",
        action="store_true",
        help="leave out of the answers' rows, for good, what no table reads: times and peaks of runs that shared a machine, "
        "nine of ten digests of kept entries, lists that measures were made of (docs/rows.md, Slim rows). For rows in git",
    )
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="FOLDER",
        help="copy the packed files, flat and with a manifest of their checksums, into this new folder: upload it as it is, and "
        "`mmkv-bench fetch` reads it from there",
    )
    parser.examples("mmkv-bench pack runs/demo", "mmkv-bench pack runs/demo --publish demo-rows")


def answer(given: argparse.Namespace) -> int:
    """Pack each folder and say what became of its size."""
    from mmkv_bench.store.compact import pack
    from mmkv_bench.store.publish import check_empty, publish
    from mmkv_bench.store.store import Store

    if given.publish is not None and len(given.rows) != 1:
        raise ConfigError(f"--publish takes the rows of one folder and got {len(given.rows)}; publish each by itself")
    if given.publish is not None:
        check_empty(given.publish)
    for folder in map(rows_folder, given.rows):
        before = _size(folder)
        dropped = pack(Store(folder), given.slim)
        said = f"; dropped {dropped} cells that newer numbers of their methods supersede" if dropped else ""
        print(f"{folder}: {before / 2**20:.1f} -> {_size(folder) / 2**20:.1f} MiB{said}")
        if given.publish is not None:
            digest = publish(Store(folder), given.publish)
            print(f"{given.publish}: ready to be uploaded; its manifest's sha256 is {digest}")
    return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

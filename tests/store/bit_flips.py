"""Flips single bits anywhere in the files of a result store and looks whether a reader notices.

    python -m tests.store.bit_flips --flips 400 results/tiny/large

A flip is noticed when reading raises a StoreError, when a journal's last line is dropped and reported as damage, and
harmless when every row reads as before. It is silent when another row, or fewer rows, come without a word.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mmkv_bench.errors import StoreError
from mmkv_bench.store.store import Store
from tests.store.store_examples import journal_damage

TABLES = ("responses", "cells", "samples", "metrics")


def content(root: Path, tables: tuple[str, ...] = TABLES) -> dict[str, list]:
    """Table -> its rows, each as text, sorted."""
    return {name: sorted(map(repr, getattr(Store(root), name)().to_pylist())) for name in tables}


def flip(root: Path, flips: int, seed: int = 0) -> tuple[Counter, list[str]]:
    """What became of `flips` seeded flips in a copy of the store at `root`: counts, and a line per silent one.

    Bits are drawn with equal chances per file, then per byte: small files have footers, too.
    """
    draw, counts, silent = random.Random(seed), Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rows"
        shutil.copytree(root, copy)
        files = sorted(path for path in copy.rglob("*") if path.suffix in (".parquet", ".jsonl", ".json"))
        before = content(copy)
        for _ in range(flips):
            path = draw.choice(files)
            data = path.read_bytes()
            place, bit = draw.randrange(len(data)), draw.randrange(8)
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            found = _what(copy, path, before)
            path.write_bytes(data)
            counts[found] += 1
            if found == "silent":
                silent.append(f"{path.relative_to(copy)}: byte {place} of {len(data)}, bit {bit}")
    return counts, silent


def _what(root: Path, path: Path, before: dict[str, list]) -> str:
    tables = TABLES if path.suffix == ".json" else ("responses",) if path.suffix == ".jsonl" else (path.parent.name,)
    try:
        after = content(root, tables)
    except StoreError:
        return "noticed"
    if all(after[name] == before[name] for name in tables):
        return "harmless"
    fewer = all(set(after[name]) <= set(before[name]) for name in tables)
    return "noticed" if fewer and path.name in journal_damage(Store(root)) else "silent"


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("rows", type=Path, nargs="+")
    command.add_argument("--flips", type=int, default=400)
    command.add_argument("--seed", type=int, default=0)
    options = command.parse_args()
    logging.disable(logging.WARNING)
    bad = 0
    for root in options.rows:
        counts, silent = flip(root, options.flips, options.seed)
        print(f"{root}: {options.flips} flips, {dict(counts)}", *silent, sep="\n  ")
        bad += len(silent)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

"""`mmkv-bench new mine.py`: a method file to start from, which runs and passes `mmkv-bench check` as it stands."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from mmkv_bench.cli.grammar import Parser

SUMMARY = "write a method file to start from, which passes `mmkv-bench check` as it stands"

PARTS = {
    "scorer": "which entries matter",
    "allocator": "how much each layer and KV head gets",
    "selector": "what stays whatever its score",
    "reducer": "what evicted entries leave behind",
    "decoding": "what goes while the answer grows",
}


def options(parser: Parser) -> None:
    """Target file and part of a method."""
    parser.add_argument("file", help="a .py file that does not exist yet; the method is called as it is")
    parser.add_argument(
        "--part", choices=PARTS, default="scorer", help="; ".join(f"{name}: {what}" for name, what in PARTS.items())
    )
    parser.examples("mmkv-bench new mine.py", "mmkv-bench new sharp_heads.py --part allocator")


def answer(given: argparse.Namespace) -> int:
    """Write it, and say what to do next; a file that is there is left as it is."""
    from mmkv_bench.methods import method_file

    method_file.write(given.file, given.part)
    name = shlex.quote(given.file)
    print(f"{given.file}: {'an' if given.part == 'allocator' else 'a'} {given.part} to start from; change it, and then")
    print(f"  mmkv-bench check {name}")
    print(f"  mmkv-bench 'method=[snapkv,{given.file}]' budget=64 out=runs/{Path(given.file).stem}")
    return 0

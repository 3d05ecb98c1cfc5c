"""`python -m tests.soak`: see the package."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import tests.soak
from tests.soak.reader import read
from tests.soak.report import report
from tests.soak.rounds import Soak
from tests.soak.runs import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=tests.soak.__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many (default: 200, about an hour)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many, however few kills there were")
    parser.add_argument("--write", type=Path, help="also write the Markdown to this file")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.read)
        return 0
    with tempfile.TemporaryDirectory(prefix="mmkv_bench_soak_") as name:
        folder = Path(name)
        soak = Soak(folder, given.kills, given.seed, given.minutes)
        words = [sys.executable, "-m", "tests.soak", "--read", name]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                soak.go()
            finally:
                (folder / "stop").touch()
            assert process.stdout is not None, "it is a pipe"
            reader = json.loads(process.stdout.read())
    text = report(soak.met, reader, given.seed)
    print(text, end="")
    if given.write:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text)
    return int(any("WRONG" in what for what in reader))


if __name__ == "__main__":
    sys.exit(main())

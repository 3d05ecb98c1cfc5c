"""`python -m mmkv_bench.verify [rows ...] [--samples k] [--seed s]`: makes a random draw of stored answers again and compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.__main__ import guarded
from mmkv_bench.errors import ConfigError

RESULTS = Path("results/tiny")
MARK = "store.json"


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    command = argparse.ArgumentParser(
        prog="python -m mmkv_bench.verify",
        description="Make a random draw of stored answers again and compare text, token ids and what was kept.",
    )
    command.add_argument("rows", type=Path, nargs="*", help=f"folders of rows; all below {RESULTS} by default")
    command.add_argument(
        "--samples", type=int, default=50, help="answers to draw, evenly from the folders (default: 50)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    command.add_argument(
        "--other-versions", action="store_true", help="also rows of other torch or transformers than the installed ones"
    )
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line: 0 all equal, 1 some answer differs, 2 refused or nothing could be made again."""
    return guarded(list(sys.argv[1:] if argv is None else argv), _main)


def _main(arguments: Sequence[str]) -> int:
    from mmkv_bench.diagnostics.verify import exit_code, lines, verify

    options = parser().parse_args(arguments)
    roots = options.rows or sorted(file.parent for file in RESULTS.glob(f"*/{MARK}"))
    missing = [root for root in roots if not (root / MARK).is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is no folder of result rows; allowed: folders that a run printed; name such a one"
        )
    if options.samples < 1 or options.seed < 0:
        raise ConfigError(f"--samples={options.samples} --seed={options.seed}: allowed are k >= 1 and a seed >= 0")
    drawn = verify(roots, options.samples, options.seed, options.other_versions)
    print("\n".join(lines(drawn)))
    return exit_code(drawn)


if __name__ == "__main__":
    sys.exit(main())

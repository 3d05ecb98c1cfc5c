"""`python -m mmkv_bench.store.pack <rows folder> [--slim]`: few files, small enough to commit or send; in place."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.errors import ConfigError, MMKVError, check_output


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own."""
    command = argparse.ArgumentParser(
        prog="python -m mmkv_bench.store.pack",
        description="Write the rows of a finished run as few files, each below 10 MB, with checksums. Tables read them as "
        "before; a run that adds rows writes files of its own beside them.",
    )
    command.add_argument("rows", type=Path, nargs="+", help="rows folder that a run printed")
    command.add_argument(
        "--slim",
        action="store_true",
        help="leave out of the answers' rows, for good, what no table reads: times and peaks of runs that shared a machine, "
        "nine of ten digests of kept entries, lists that measures were made of (docs/rows.md, Slim rows). For rows in git",
    )
    options = command.parse_args(argv)
    for folder in options.rows:
        try:
            check_output()
            if not (folder / "store.json").exists():
                raise ConfigError(f"{folder} holds no result rows; name the rows folder that a run printed")
            from mmkv_bench.store.store import Store

            before = _size(folder)
            dropped = Store(folder).pack(options.slim)
            said = f"; dropped {dropped} cells that newer numbers of their methods supersede" if dropped else ""
            print(f"{folder}: {before / 2**20:.1f} -> {_size(folder) / 2**20:.1f} MiB{said}")
        except MMKVError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())

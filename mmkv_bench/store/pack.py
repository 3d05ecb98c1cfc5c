"""`python -m mmkv_bench.store.pack <rows folder>`: one file per table, small enough to commit or send; in place."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.errors import ConfigError, MMKVError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own."""
    command = argparse.ArgumentParser(
        prog="python -m mmkv_bench.store.pack",
        description="Write the rows of a finished run as one file per table. Tables read them as before; a run that adds "
        "rows unpacks them again.",
    )
    command.add_argument("rows", type=Path, nargs="+", help="rows folder that a run printed")
    for folder in command.parse_args(argv).rows:
        try:
            if not (folder / "store.json").exists():
                raise ConfigError(f"{folder} holds no result rows; name the rows folder that a run printed")
            from mmkv_bench.store.store import Store

            before = _size(folder)
            Store(folder).pack()
            print(f"{folder}: {before / 2**20:.1f} -> {_size(folder) / 2**20:.1f} MiB")
        except MMKVError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())

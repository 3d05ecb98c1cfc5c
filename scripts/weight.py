#!/usr/bin/env python3
"""Refuses what makes a clone heavy: a file over 10 MB, or more than 25 MB below results/. Part of `make lint`.

As a hook of git: ln -s ../../scripts/weight.py .git/hooks/pre-commit
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILE, RESULTS = 10_000_000, 25_000_000


def too_heavy(root: Path) -> list[str]:
    """A sentence for each thing that is too large among the files that git has or would take in the checkout `root`."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    files = [name for name in sorted(set(listed.stdout.split("\0")) - {""}) if (root / name).is_file()]
    sizes = {name: (root / name).stat().st_size for name in files}
    results = sum(size for name, size in sizes.items() if name.startswith("results/"))
    found = [
        f"{name} has {size / 1e6:.1f} MB; the limit of a file is {FILE / 1e6:.0f} MB"
        for name, size in sizes.items()
        if size > FILE
    ]
    if results > RESULTS:
        found.append(f"results/ has {results / 1e6:.1f} MB; its limit is {RESULTS / 1e6:.0f} MB")
    return found


def main() -> int:
    try:
        found = too_heavy(Path.cwd())
    except (OSError, subprocess.CalledProcessError):
        print("weight: no git checkout here, nothing to check")
        return 0
    for line in found:
        print(f"error: {line}. Rows: `python -m mmkv_bench pack <rows> --slim`.", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

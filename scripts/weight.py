#!/usr/bin/env python3
"""Refuse files that make a clone heavy: a file over 10 MB, or more than 30 MB below results/.

Part of `make lint` and of the git hooks (.pre-commit-config.yaml).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILE, RESULTS = 10_000_000, 30_000_000


def too_heavy(root: Path) -> list[str]:
    """Return a sentence per file that is too large, and one if results/ is too large, in the checkout `root`.

    Staged files and files on disk are checked; files that git ignores are left out."""
    staged = _staged(root)
    here = {
        name for name in _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0") if name
    }
    lying = {name: (root / name).stat().st_size for name in here if (root / name).is_file()}
    sizes = {name: max(staged.get(name, 0), lying.get(name, 0)) for name in sorted(here)}
    results = sum(size for name, size in sizes.items() if name.startswith("results/"))
    found = [
        f"{name} has {size / 1e6:.1f} MB; the limit of a file is {FILE / 1e6:.0f} MB"
        for name, size in sizes.items()
        if size > FILE
    ]
    if results > RESULTS:
        found.append(f"results/ has {results / 1e6:.1f} MB; its limit is {RESULTS / 1e6:.0f} MB")
    return found


def _staged(root: Path) -> dict[str, int]:
    """Return the bytes of every file in the index, as the next commit would contain it."""
    entries = [entry.split("\t", 1) for entry in _git(root, "ls-files", "-z", "--stage").split("\0") if entry]
    objects = "".join(f"{facts.split()[1]}\n" for facts, _ in entries)
    told = _git(root, "cat-file", "--batch-check=%(objectsize)", given=objects).splitlines()
    return {name: int(size) for (_, name), size in zip(entries, told, strict=True) if size.isdecimal()}


def _git(root: Path, *words: str, given: str | None = None) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], input=given, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> int:
    try:
        found = too_heavy(Path.cwd())
    except (OSError, subprocess.CalledProcessError):
        print("weight: this folder is not a git checkout, nothing to check")
        return 0
    for line in found:
        print(f"error: {line}. Rows: `python -m mmkv_bench pack <rows> --slim`.", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

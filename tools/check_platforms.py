"""`make check-platforms`: test whether requirements.lock can be installed on every platform in docs/run.md, without downloads.

For each platform and Python version, uv looks in the package index whether every locked version has a wheel there.
Four packages are published as source only; they are plain Python, so any platform can build them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS 14 arm64": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SOURCE_ONLY = ("antlr4-python3-runtime", "docopt", "transformers-stream-generator", "zss")
MACOS = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}


def missing(uv: str, lock: Path, platform: str, python: str) -> str | None:
    """Return uv's text about what cannot be installed on a platform; None if the whole lock file can."""
    command = [uv, "pip", "compile", str(lock), "--no-deps", "--quiet", "--only-binary", ":all:"]
    command += ["--python-platform", platform, "--python-version", python]
    for package in SOURCE_ONLY:
        command += ["--no-binary", package]
    done = subprocess.run(command, env=os.environ | MACOS, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def unreachable(uv: str) -> str | None:
    """Return uv's text about why the package index does not answer; None if it answers."""
    command = [uv, "pip", "compile", "--quiet", "--no-deps", "--no-cache", "-"]
    done = subprocess.run(command, input="pytz", capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else " ".join(done.stderr.split())


def main() -> int:
    """Return the exit code: 0, or 1 if a platform lacks something."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--uv", default="uv", help="the uv to ask")
    options.add_argument("--lock", type=Path, default=Path("requirements.lock"))
    options.add_argument("--if-reachable", action="store_true", help="without an index say so, and fail nothing")
    chosen = options.parse_args()
    if chosen.if_reachable and (why := unreachable(chosen.uv)) is not None:
        print(f"not checked on any platform, the package index cannot be reached: {why}")
        return 0
    pairs = list(product(PLATFORMS, PYTHONS))
    with ThreadPoolExecutor(4) as pool:  # uv waits for the index most of the time
        found = pool.map(lambda pair: missing(chosen.uv, chosen.lock, PLATFORMS[pair[0]], pair[1]), pairs)
        problems = 0
        for (name, python), problem in zip(pairs, found, strict=True):
            problems += problem is not None
            print(f"{name}, Python {python}: {'ok' if problem is None else problem}", flush=True)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())

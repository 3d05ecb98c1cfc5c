"""The folder of what is kept between runs: checksums, fetched weights, conversions, measured devices."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$MMKV_BENCH_CACHE`, else `$XDG_CACHE_HOME/mmkv_bench`, else `~/.cache/mmkv_bench`."""
    chosen = os.environ.get("MMKV_BENCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen).expanduser() if chosen else Path(base) / "mmkv_bench"

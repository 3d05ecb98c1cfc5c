"""Shared set-up: reproducible, offline, one thread (the zoo's matrices are too small to gain from more)."""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The libraries' objects stay to the end; looking through them for cycles every 700 allocations was a twentieth of the time.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Tell `cover.examples`, which is asked while tests are imported, whether what is marked full runs."""
    if config.option.markexpr not in ("not slow and not full", "slow and not full", "not full"):
        os.environ["MMKV_TEST_FULL"] = "1"


def pytest_collection_finish() -> None:
    """Leave what collecting has imported out of every later collection of garbage: what is measured collects before each pass."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter end as it does elsewhere: libraries print what is still held then."""
    gc.unfreeze()

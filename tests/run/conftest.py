"""One cache of pages for all tests of runs, and the libraries of a run imported and used once before anything forks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mmkv_bench
from tests.run.setting import extended


@pytest.fixture(scope="package", autouse=True)
def _surroundings(tmp_path_factory):
    """Workers of pytest-xdist share the cache too: pages are published whole or not at all."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    patch = pytest.MonkeyPatch()
    patch.setenv("MMKV_BENCH_CACHE", str(shared / "run_cache"))
    patch.setenv("PYTHONPATH", str(Path(mmkv_bench.__file__).parents[1]))  # for processes that a test starts
    yield
    patch.undo()


@pytest.fixture(scope="module")
def own_parts():
    """The folder of the configuration files of the methods in `tests/run/own`, whose parts are then the package's."""
    from mmkv_bench.compression import reducers, scorers

    own = Path(__file__).parent / "own"
    with extended(scorers, own / "scorers"), extended(reducers, own / "reducers"):
        yield own / "conf"

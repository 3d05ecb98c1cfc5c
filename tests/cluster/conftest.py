"""One cluster for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.cluster import slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A running cluster; without Slurm its tests skip and say what is missing."""
    if lacking := slurm.missing():
        pytest.skip(f"Slurm is not installed (no {', '.join(lacking)}); apt-get install slurm-wlm munge")
    started = slurm.start(tmp_path_factory.mktemp("slurm"))
    yield started
    slurm.stop(started)

"""One cluster for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.run.setting import done
from tests.slurm import slurm
from tests.slurm.setting import rows


@pytest.fixture(scope="session")
def daemons(tmp_path_factory):
    """A running cluster; without Slurm its tests skip and say what is missing."""
    if lacking := slurm.missing():
        pytest.skip(f"Slurm is not installed (no {', '.join(lacking)}); apt-get install slurm-wlm munge")
    started = slurm.start(tmp_path_factory.mktemp("slurm"))
    yield started
    slurm.stop(started)


@pytest.fixture
def cluster(daemons):
    """The same with an empty queue: jobs that a failed test leaves are not the next one's."""
    yield daemons
    slurm.clear(daemons)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The rows of one uninterrupted run in this process, by its overrides."""
    made = {}

    def rows_of(work):
        if work not in made:
            root = tmp_path_factory.mktemp("alone")
            done(root, *work)
            made[work] = rows(root)
        return made[work]

    return rows_of

"""Sweeps on a real Slurm: arrays of jobs make the rows of a single run here, whatever happens to them on the way."""

from __future__ import annotations

import pytest

from tests.cluster.setting import WORK, finished, rows, start
from tests.each import each
from tests.run.setting import done


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Rows of one uninterrupted run in this process."""
    root = tmp_path_factory.mktemp("alone")
    done(root, *WORK)
    return rows(root)


@pytest.mark.full
@each("verb", [("sweep",), ("-m",)])
def test_an_array_of_jobs_makes_the_rows_of_one_run(cluster, alone, tmp_path, verb):
    code, out, err = finished(start(cluster, tmp_path, *WORK, "shards=2", verb=verb))
    assert code == 0, err
    assert rows(tmp_path) == alone
    assert "4 jobs submitted" in err and "snapkv" in out
    (script,) = (tmp_path / "sweep" / ".submitit").glob("*/*_submission.sh")
    assert "#SBATCH --array=0-3%4" in script.read_text()
    again = finished(start(cluster, tmp_path, *WORK, "shards=3", verb=verb))  # nothing is left, however it is split
    assert again[0] == 0 and "submitted" not in again[2]

"""Sweeps on a real Slurm that takes a job's time, its node, its disk: the rows end as those of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.each import each
from tests.slurm.setting import LONG, answering, finished, log_of, rows, start
from tests.slurm.slurm import until

IMAGE = ("slurm.container=image.sif", "slurm.runtime=apptainer", f"slurm.python={sys.executable}")
APPTAINER = """\
#!/bin/sh
# exec --nv --bind <folders> <image> <command>: where Slurm's programs are not on PATH
shift 5
PATH=/nowhere exec "$@"
"""
SLEEPING = """
from __future__ import annotations

import os
import time
from dataclasses import dataclass

from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class SleepingScorer(Scorer):
    def key(self, budget, length):
        return ()

    def score(self, obs, budget, seed):
        time.sleep(1.6 if os.path.exists(os.path.join(os.path.dirname(__file__), "slowly")) else 0)
        return obs.key.float().norm(dim=-1)
"""


@pytest.mark.full
def test_a_job_near_its_time_limit_is_queued_again_and_goes_on(cluster, alone, tmp_path):
    """The shortest limit that submitit takes for one, and its signal as early as in a job's last ten minutes."""
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    own = ("method=[custom]", f"methods.custom.path={tmp_path / 'sleeping.py'}", "budget=16")
    work = ("model=tiny", "dataset=[pages_walk]", *own, "limit=30", "fidelity=off")
    # the signal comes after two minutes: a busy machine begins late
    limit = ("hydra.launcher.timeout_min=11", "hydra.launcher.signal_delay_s=540")
    root = tmp_path / "rows"
    (tmp_path / "slowly").touch()  # 3 layers: two and a half minutes in all
    process = start(cluster, root, *work, *limit)
    job = answering(cluster, root)
    assert "Requeue=1" in cluster.ask("scontrol", "show", "job", job)
    code, _, err = finished(process)
    assert code == 0, err
    said = log_of(root, job)
    assert "ended by SIGUSR2 after the current sample, to be queued again" in said
    (tmp_path / "slowly").unlink()
    assert rows(root) == alone(work)


@pytest.mark.full
@each(
    "words, said",
    [
        ((), ", to be queued again"),
        (("shards=2",), ", to be queued again"),
        (("shards=2", *IMAGE), "; whether it was cancelled or preempted cannot be asked from this node"),
    ],
)
def test_preempted_jobs_come_back_when_their_node_is_free(cluster, alone, tmp_path, words, said):
    """One job, tasks of an array, whose last has the array's own id, and tasks in an image."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(APPTAINER)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    path, root = f"{tmp_path / 'bin'}:{cluster.environment['PATH']}", tmp_path / "rows"
    process = start(cluster, root, *LONG, "hydra.launcher.partition=low", *words, PATH=path)
    jobs = 2 if "shards=2" in words else 1
    at_work = lambda: sum(path.stat().st_size > 0 for path in (root / "journal").glob("*.jsonl"))  # noqa: E731
    until("all jobs at work", lambda: at_work() >= jobs, 300)
    cluster.ask("sbatch", "--partition=high", "--cpus-per-task=8", f"--output={tmp_path}/other", "--wrap=sleep 2")
    code, _, err = finished(process)
    assert code == 0, err
    logs = [path.read_text() for path in (root / "sweep" / ".submitit").glob("*/*_log.err")]
    assert [f"ended by SIGTERM after the current sample{said}" in log for log in logs] == [True] * jobs, logs
    assert rows(root) == alone(LONG)


@pytest.mark.full
def test_a_full_disk_loses_nothing_and_the_same_command_goes_on(cluster, alone, tmp_path):
    """A quota on files, set on the node: what a job has committed stays, and it says what it could not write."""
    root = tmp_path / "rows"
    full = "hydra.launcher.setup=['ulimit -f 48']"  # KiB
    code, _, err = finished(start(cluster, root, *LONG, full))
    assert code == 1 and "Traceback" not in err, err
    assert "samples of tiny pages_walk_small are missing; run the same command again" in err
    (said,) = [line for line in err.splitlines() if "(tiny pages_walk_small): " in line]
    assert "full" in said or "quota" in said or "too large" in said.lower(), said
    code, _, err = finished(start(cluster, root, *LONG))
    assert code == 0, err
    assert rows(root) == alone(LONG)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 96 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"only root may mount a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    with (disk / "filler").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        with contextlib.suppress(OSError):
            while file.write(b"\0"):
                pass
    return disk / "filler"


@pytest.mark.full
def test_a_disk_that_fills_up_under_a_job_ends_the_sweep_with_a_sentence_and_it_goes_on(cluster, alone, small_disk):
    """The file system itself is full (ENOSPC), for the job, its log, and the sweep that waits for it."""
    root = small_disk / "rows"
    process = start(cluster, root, *LONG)
    answering(cluster, root)
    filler = fill(small_disk)
    code, _, err = finished(process)
    assert code == 2 and "Traceback" not in err, err
    assert "samples of tiny pages_walk_small are missing; run the same command again" in err
    assert "No space left on device" in err.splitlines()[-1] and "ree some space" in err.splitlines()[-1], err
    assert rows(root)[0].items() <= alone(LONG)[0].items()
    code, _, err = finished(start(cluster, root, *LONG))
    assert code == 2 and "No space left on device" in err and "submitted" not in err, err
    filler.unlink()
    code, _, err = finished(start(cluster, root, *LONG))
    assert code == 0, err
    assert rows(root) == alone(LONG)


@pytest.mark.full
def test_a_folder_that_only_the_login_node_sees_is_named_and_nothing_is_lost(cluster, tmp_path):
    """The sweep has a file system there that the node's daemon, started before in another mount namespace, has not."""
    root = tmp_path / "rows"
    root.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a folder that others do not see")
    code, _, err = finished(start(cluster, root, *LONG[:4], "limit=2", unseen=root))
    assert code == 1 and "Traceback" not in err, err
    assert "does not see this folder" in err and str(root) in err
    assert "samples of tiny pages_walk_small are missing; run the same command again" in err
    assert not any(root.iterdir())


@pytest.fixture
def read_only(tmp_path):
    """A function that lets nobody write to a folder any more."""
    mounted = []

    def shut(folder: Path) -> None:
        for words in (("--bind", str(folder), str(folder)), ("-o", "remount,ro,bind", str(folder))):
            done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"only root may mount a folder read-only: {done.stderr.strip()}")
            mounted.append(folder)

    yield shut
    for folder in dict.fromkeys(mounted):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.full
def test_a_store_that_nobody_can_write_to_is_refused_before_anything_is_submitted(cluster, tmp_path, read_only):
    root = tmp_path / "rows"
    code, _, err = finished(start(cluster, root, *LONG[:4], "limit=2"))
    assert code == 0, err
    before = rows(root)
    read_only(root)
    code, _, err = finished(start(cluster, root, *LONG[:4], "limit=4"))
    assert code and "read-only" in err.lower() and "submitted" not in err and "Traceback" not in err
    assert rows(root) == before and not cluster.ask("squeue", "-h")

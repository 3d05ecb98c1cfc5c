"""Sweeps on a real Slurm: arrays of jobs make the rows of a single run here, whatever happens to them on the way."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mmkv_bench.config.files import conf_dir
from mmkv_bench.store import provenance
from mmkv_bench.store.store import Store
from tests.each import each
from tests.run.setting import done
from tests.slurm.setting import LONG, SMALL, WORK, answering, finished, log_of, rows, start

TOGETHER = """\
#!/bin/sh
touch "{folder}/$$"
for second in $(seq 60); do
    [ "$(ls "{folder}" | wc -l)" -lt 2 ] || break
    sleep 1
done
PATH="{path}" exec sbatch "$@"
"""
"""In the place of sbatch: waits for a second one."""


@pytest.mark.full
@each("verb", [("sweep",), ("-m",)])
def test_an_array_of_jobs_makes_the_rows_of_one_run(cluster, alone, tmp_path, verb):
    code, out, err = finished(start(cluster, tmp_path, *WORK, "shards=2", verb=verb))
    assert code == 0, err
    assert rows(tmp_path) == alone(WORK)
    assert "4 jobs submitted" in err and "snapkv" in out
    scripts = {path.resolve() for path in (tmp_path / "sweep" / ".submitit").glob("*/*_submission.sh")}
    assert ["#SBATCH --array=0-3%4" in path.read_text() for path in scripts] == [True]
    code, _, err = finished(
        start(cluster, tmp_path, *WORK, "shards=3", verb=verb)
    )  # nothing is left, however it is split
    assert code == 0 and "submitted" not in err


@pytest.mark.full
def test_datasets_that_are_soon_done_share_a_job_and_one_job_runs_at_a_time(cluster, alone, tmp_path):
    """By the rate of the rows of a first, small sweep, whose datasets had a job each, one after the other."""
    code, _, err = finished(start(cluster, tmp_path, *WORK[:-1], "limit=3", "hydra.launcher.array_parallelism=1"))
    assert code == 0 and "2 jobs submitted" in err, err
    scripts = {path.resolve() for path in (tmp_path / "sweep" / ".submitit").glob("*/*_submission.sh")}
    assert ["#SBATCH --array=0-1%1" in path.read_text() for path in scripts] == [True]
    times = sorted(
        (min(times), max(times))
        for dataset in ("pages_walk_small", "pages_lookup_small")
        for times in [
            [row["committed_at"] for row in Store(tmp_path).responses().to_pylist() if row["dataset"] == dataset]
        ]
    )
    assert times[0][1] < times[1][0]
    code, _, err = finished(start(cluster, tmp_path, *WORK, "shards=1"))
    assert code == 0 and "1 jobs submitted" in err, err
    assert rows(tmp_path) == alone(WORK)


def step_of(job: str) -> int:
    """The process that answers in a job."""
    found = subprocess.run(["pgrep", "-f", "submitit.core._submit .*"], capture_output=True, text=True).stdout.split()
    named = [int(one) for one in found if f"SLURM_JOB_ID={job}\0" in Path(f"/proc/{one}/environ").read_text()]
    return max(named)


@pytest.mark.full
@each("way", ["usr1", "usr2", "requeue"])
def test_a_job_that_slurm_stops_comes_back_and_the_sweep_goes_on(cluster, alone, tmp_path, way):
    process = start(cluster, tmp_path, *LONG)
    job = answering(cluster, tmp_path)
    if way != "requeue":
        cluster.ask("scancel", f"--signal={way.upper()}", f"{job}.0")
    else:
        cluster.ask("scontrol", "requeue", job)
    code, _, err = finished(process)
    assert code == 0, err
    assert rows(tmp_path) == alone(LONG)
    said = f"ended by SIG{way.upper()} after the current sample, to be queued again"
    assert (said in log_of(tmp_path, job)) is (way != "requeue")
    assert set(Store(tmp_path).responses(columns=["status"])["status"].to_pylist()) == {"ok"}


@pytest.mark.full
@each("way", ["kill", "scancel"])
def test_after_a_job_that_was_killed_the_same_command_finds_the_rest(cluster, alone, tmp_path, way):
    process = start(cluster, tmp_path, *LONG)
    job = answering(cluster, tmp_path)
    if way == "kill":
        os.kill(step_of(job), signal.SIGKILL)
    else:
        cluster.ask("scancel", job)
    code, _, err = finished(process)
    assert code == 1
    assert "samples of tiny pages_walk_small are missing; run the same command again" in err
    assert f"job {job} (tiny pages_walk_small):" in err and "see " in err and "Traceback" not in err
    before = len(Store(tmp_path).responses(columns=["cell"]))
    assert 0 < before < len(alone(LONG)[0])
    code, _, err = finished(start(cluster, tmp_path, *LONG, "shards=2"))
    assert code == 0, err
    assert rows(tmp_path) == alone(LONG)


@pytest.mark.full
def test_two_sweeps_at_the_same_cells_make_their_rows_once(cluster, alone, tmp_path):
    """Their jobs are noted in two folders, and each sends its own only when the other one does: neither finds the other's, and
    both answer every sample."""
    program, root = tmp_path / "bin" / "sbatch", tmp_path / "rows"
    (tmp_path / "here").mkdir()
    program.parent.mkdir()
    program.write_text(TOGETHER.format(folder=tmp_path / "here", path=cluster.environment["PATH"]))
    program.chmod(0o755)
    path = f"{program.parent}:{cluster.environment['PATH']}"
    notes = [f"hydra.launcher.submitit_folder={tmp_path}/notes-{count}/%j" for count in (1, 2)]
    both = [start(cluster, root, *LONG, f"shards={count}", notes[count - 1], PATH=path) for count in (1, 2)]
    ended = [finished(process) for process in both]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [f"{count} jobs submitted" in err for count, (_, _, err) in enumerate(ended, 1)] == [True, True], ended
    stored = [row for file in Store(root).files("responses") for row in pq.read_table(file).to_pylist()]
    assert {row["worker"].partition("-")[2] for row in stored} == {"0of1", "0of2", "1of2"}
    assert len(stored) > len(alone(LONG)[0]), "no sample was answered by two jobs"
    assert rows(root) == alone(LONG)


@pytest.mark.full
def test_slurms_own_sentence_is_passed_on_and_nothing_is_lost(cluster, tmp_path):
    code, _, err = finished(start(cluster, tmp_path, *WORK, "hydra.launcher.partition=nowhere"))
    assert code == 2
    (said,) = [line for line in err.splitlines() if "sbatch" in line]
    assert "sbatch refuses" in said and "invalid partition" in said.lower() and "nothing was submitted" in said
    assert not cluster.ask("squeue", "-h")


@pytest.mark.full
def test_cells_that_another_version_wrote_are_named_and_stay_beside_those_of_this_one(
    cluster, alone, tmp_path, monkeypatch
):
    work = (*LONG[:4], "limit=2")
    plain = provenance.version
    monkeypatch.setattr(provenance, "version", lambda name: "0.1" if name == "torch" else plain(name))
    done(tmp_path, *work)
    monkeypatch.undo()
    older = rows(tmp_path)
    code, _, err = finished(start(cluster, tmp_path, *work))
    assert code == 0, err
    (said,) = [line for line in err.splitlines() if "of another version" in line]
    assert "have rows of another version" in said and "torch 0.1 for " in said and "those rows stay" in said
    for now, before, own in zip(rows(tmp_path), older, alone(work), strict=True):
        assert now == before | own and not before.keys() & own.keys()


@pytest.mark.full
def test_the_commands_of_the_page_about_clusters_work(cluster, tmp_path):
    page = (conf_dir().parent / "docs" / "clusters.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    ours = [line for line in commands if line.startswith("mmkv-bench ")]
    assert [line.split()[1] for line in ours] == ["plan", "data", "sweep", "sweep", "status", "tables"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    environment = {**cluster.environment, **offline}
    for line in ours:
        words = [word.replace("$SHARED", str(tmp_path)) for word in shlex.split(line)[1:]]
        small = [*SMALL, "model.device=cpu"] if words[0] == "sweep" else []
        command = [sys.executable, "-m", "mmkv_bench", *words, *small]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert told.returncode == 0, f"{line}: {told.stderr}"
        if "dry=true" in words:
            assert "#SBATCH --partition=low" in told.stdout and not (tmp_path / "rows").exists()
        if words[0] == "plan":
            assert "ready      nothing" in told.stdout
    assert len(rows(tmp_path / "rows")[0]) == 2 * 2 * 19
    shown = [path.name for path in (tmp_path / "rows" / "wandb").glob("offline-run-*")]
    assert len([name for name in shown if name.endswith("-summary")]) == 1
    assert {name.split("-")[-2] for name in shown if not name.endswith("-summary")} == {"0of2", "1of2"}

"""Sweeps that submit, wait or refuse, as far as programs that stand in for Slurm's can show it: no job runs."""

from __future__ import annotations

import json
import os

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.cluster import queue
from tests.cluster.stand_ins import stand_ins

WORK = ["model=tiny", "dataset=[pages_walk]", "limit=5", "shards=5", "out=rows"]
SWEEP = ("sweep", "launcher=slurm", "slurm.wait=false", *WORK)
"""Three of the shards have samples, so it has three jobs."""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    made = stand_ins(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queue, "_SHORTEST_S", 0.01)
    return made


def noted(folder) -> list[str]:
    return [json.loads(line)["job"] for line in (folder / "rows/sweep/.submitit/jobs.jsonl").read_text().splitlines()]


def test_a_sweep_that_does_not_wait_ends_while_its_jobs_are_queued(slurm, tmp_path, capsys):
    assert main([*SWEEP]) == 0
    said = capsys.readouterr().err
    assert (
        "3 jobs submitted (71)" in said and "the same command, or mmkv-bench score, scores when they are done" in said
    )
    assert slurm.lines("queue") == ["71_0", "71_1", "71_2"] == noted(tmp_path)
    assert "samples are missing" not in said


def test_more_jobs_than_an_array_may_have_are_several_arrays(slurm, tmp_path, capsys):
    slurm.put(largest=2)
    assert main([*SWEEP]) == 0
    assert "3 jobs submitted (71 72)" in capsys.readouterr().err
    assert slurm.lines("queue") == ["71_0", "71_1", "72"] == noted(tmp_path)


def test_jobs_taken_before_a_refusal_are_noted_and_the_next_sweep_waits_for_them(slurm, tmp_path, capsys):
    slurm.put(largest=2, taken=1)
    assert main([*SWEEP]) == 2
    said = capsys.readouterr().err
    assert (
        "sbatch refuses: QOSMaxSubmitJobPerUserLimit" in said and "; 2 jobs were taken before and stay queued" in said
    )
    assert noted(tmp_path) == ["71_0", "71_1"]
    slurm.put(taken=9, ends="yes")
    assert main([*SWEEP]) == 0
    said = capsys.readouterr().err
    assert said.index("waiting for jobs of an earlier sweep here: 71_0 71_1\n") < said.index("3 jobs submitted")
    lengths = [line for line in slurm.lines("asked") if line.startswith("sbatch")]
    assert lengths[:2] == ["sbatch 0", "sbatch 0"], "the second sweep submitted while jobs of the first were queued"


def test_where_squeue_never_answers_nothing_is_submitted_twice(slurm, tmp_path, capsys):
    assert main([*SWEEP]) == 0
    slurm.put(silent=99)
    capsys.readouterr()
    assert main([*SWEEP]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "squeue does not answer, and any of 3 jobs" in said and "nothing was submitted" in said
    slurm.put(silent=2, ends="yes")
    assert main([*SWEEP]) == 0
    assert "waiting for jobs of an earlier sweep here: 71_0 71_1 71_2\n" in capsys.readouterr().err
    assert len(slurm.lines("scripts")) == 2


def test_of_tasks_of_an_array_that_left_samples_the_last_words_are_quoted_from_their_own_logs(slurm, tmp_path, capsys):
    slurm.put(ends="yes")
    log = tmp_path / "rows/sweep/.submitit/71_1/71_1_0_log.err"
    log.parent.mkdir(parents=True)
    log.write_text("mmkv_bench: the disk is full\nsomething of a library\n")
    assert main([*SWEEP, "slurm.wait=true"]) == 1
    said = capsys.readouterr().err
    assert "samples are missing of tiny pages_walk_small; run the same command again" in said
    assert f"job 71_1 (tiny pages_walk_small shard 2/5): the disk is full; see {log}\n" in said
    assert f"it left no log at {tmp_path / 'rows/sweep/.submitit/71_0/71_0_0_log.err'}: " in said
    assert main([*SWEEP, "slurm.wait=true", "retry=[oom]"]) == 1
    assert (
        "missing of tiny pages_walk_small, or still have what retry=[oom] is to make again; run"
        in capsys.readouterr().err
    )

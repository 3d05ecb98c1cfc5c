"""Sweeps that submit, wait or refuse, as far as programs that stand in for Slurm's can show it: no job runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.slurm import queue, submission
from mmkv_bench.store.files import lock_held
from tests.slurm.stand_ins import stand_ins

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
    assert "are missing; run" not in said


def test_more_jobs_than_an_array_may_have_are_several_arrays(slurm, tmp_path, capsys):
    slurm.put(largest=2)
    assert main([*SWEEP]) == 0
    assert "3 jobs submitted (71 72)" in capsys.readouterr().err
    assert slurm.lines("queue") == ["71_0", "71_1", "72"] == noted(tmp_path)


@pytest.mark.slow
def test_jobs_taken_before_a_refusal_are_noted_and_the_next_sweep_waits_for_them(slurm, tmp_path, capsys):
    slurm.put(largest=2, taken=1)
    assert main([*SWEEP]) == 2
    said = capsys.readouterr().err
    assert (
        "sbatch refuses: QOSMaxSubmitJobPerUserLimit" in said
        and "; 2 jobs were accepted before and stay queued" in said
    )
    assert noted(tmp_path) == ["71_0", "71_1"]
    slurm.put(taken=9, ends="yes")
    assert main([*SWEEP]) == 0
    said = capsys.readouterr().err
    assert said.index("waiting for jobs of an earlier sweep in this folder: 71_0 71_1\n") < said.index(
        "3 jobs submitted"
    )
    lengths = [line for line in slurm.lines("asked") if line.startswith("sbatch")]
    assert lengths[:2] == ["sbatch 0", "sbatch 0"], "the second sweep submitted while jobs of the first were queued"


@pytest.mark.slow
def test_where_squeue_never_answers_nothing_is_submitted_twice(slurm, tmp_path, capsys):
    assert main([*SWEEP]) == 0
    slurm.put(silent=99)
    capsys.readouterr()
    assert main([*SWEEP]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "squeue does not answer, and 3 jobs" in said and "nothing was submitted" in said
    slurm.put(silent=2, ends="yes")
    assert main([*SWEEP]) == 0
    assert "waiting for jobs of an earlier sweep in this folder: 71_0 71_1 71_2\n" in capsys.readouterr().err
    assert len(slurm.lines("scripts")) == 2


@pytest.mark.slow
def test_of_tasks_of_an_array_that_left_samples_the_last_words_are_quoted_from_their_own_logs(slurm, tmp_path, capsys):
    slurm.put(ends="yes")
    log = tmp_path / "rows/sweep/.submitit/71_1/71_1_0_log.err"
    log.parent.mkdir(parents=True)
    ended = "srun: error: node7: task 0: Exited with exit code 2\nsrun: Terminating StepId=71.0\n"
    log.write_text(f"mmkv_bench: the disk is full\nsomething of a library\n{ended}")
    other = Path(str(log).replace("71_1", "71_2"))
    other.parent.mkdir()
    other.write_text(f"/bin/python: No module named submitit\n{ended}")
    assert main([*SWEEP, "slurm.wait=true"]) == 1
    said = capsys.readouterr().err
    assert "samples of tiny pages_walk_small are missing; run the same command again" in said
    assert f"job 71_1 (tiny pages_walk_small shard 2/5): the disk is full; see {log}\n" in said
    assert f"shard 3/5): /bin/python: No module named submitit; see {other}\n" in said
    assert f"it left no log at {tmp_path / 'rows/sweep/.submitit/71_0/71_0_0_log.err'}: " in said
    assert main([*SWEEP, "slurm.wait=true", "retry=[oom]"]) == 1
    assert (
        "samples of tiny pages_walk_small are missing, or still have rows to repeat by retry=[oom]; run"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_programs_that_hang_are_ended_and_asked_again(slurm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(queue, "WAIT_S", 0.5)
    for hangs in ("squeue", "scontrol"):
        slurm.put(hangs=hangs, ends="yes")
        assert main([*SWEEP, "slurm.wait=true", f"out=rows-{hangs}"]) == 1  # no job of a stand-in answers
        said = capsys.readouterr().err
        assert said.count("squeue does not answer; asking again until it does") == (hangs == "squeue")
        assert "3 jobs submitted" in said and "are missing; run" in said
    monkeypatch.setattr(submission, "SUBMIT_S", 0.5)
    slurm.put(hangs="sbatch", queue="")
    assert main([*SWEEP, "out=rows-sbatch"]) == 2
    said = capsys.readouterr().err
    assert "sbatch does not answer within 0 s" in said and "cancel it before" in said and "nothing was sub" in said
    assert not list((tmp_path / "rows-sbatch/sweep/.submitit").glob("*.pkl"))


def test_an_id_is_taken_from_slurms_own_line_or_from_the_queue(slurm, tmp_path, capsys):
    for text, name in (
        ("Submitted batch job 71", "71"),
        ("budget: job 42 hours\nSubmitted batch job 71 on cluster b\nhave a nice day", "71"),
        ("71;b\n", "71"),
        ("job 42 hours", None),
        ("Submitted batch job 71\nSubmitted batch job 72", None),
    ):
        assert submission.job_id_in_output(text) == name
    slurm.put(prints="job 42 hours")
    assert main([*SWEEP]) == 0
    assert "3 jobs submitted (71)" in capsys.readouterr().err and noted(tmp_path) == ["71_0", "71_1", "71_2"]


def test_a_sweep_started_beside_another_waits_for_its_lock_and_sees_its_jobs(slurm, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "rows/sweep/.submitit"
    folder.mkdir(parents=True)
    (folder / "jobs.jsonl").touch()
    other, waits = lock_held(folder / "jobs.jsonl"), []

    def other_submits(_):
        if not waits:
            assert not slurm.lines("scripts")
            queue.record_jobs(folder, {"70": ["tiny pages_walk_small"]})
            slurm.put(queue="70", ends="yes")
            other.__exit__(None, None, None)
        waits.append(True)

    other.__enter__()
    monkeypatch.setattr(queue, "time", SimpleNamespace(sleep=other_submits))
    assert main([*SWEEP]) == 0
    said = capsys.readouterr().err
    assert said.index("another sweep is submitting") < said.index("jobs of an earlier sweep in this folder: 70\n")
    assert [line for line in slurm.lines("asked") if line.startswith("sbatch")] == ["sbatch 0"]


def test_all_arrays_of_a_sweep_share_one_limit_of_running_jobs(slurm, tmp_path, capsys):
    for sizes, most, shares in (
        ([3], 16, [(3, None)]),
        ([2, 1], 1, [(1, None), (1, 0)]),
        ([100, 100, 1], 16, [(8, None), (7, None), (1, None)]),
        ([4, 4, 4, 4, 2], 3, [(1, None), (1, None), (1, None), (1, 0), (1, 1)]),
    ):
        assert submission.lanes(sizes, most) == shares
    slurm.put(largest=2)
    assert main([*SWEEP, "hydra.launcher.array_parallelism=1"]) == 0
    first, second = (Path(path).resolve().read_text() for path in slurm.lines("scripts"))
    assert "#SBATCH --array=0-1%1\n" in first and "dependency" not in first and "wckey" not in first
    assert "#SBATCH --dependency=afterany:71\n" in second


@pytest.mark.slow
def test_datasets_that_are_soon_done_share_a_job(slurm, tmp_path, capsys):
    work = ["model=tiny", "method=[full]", "out=rows", "slurm.wait=false"]
    both = "dataset=[pages_walk,pages_lookup]"
    assert main(["run", *work[:3], "dataset=[pages_walk]", "limit=3", "fork_batch=1"]) == 0
    slurm_of = ["sweep", "launcher=slurm", *work, both, "limit=6"]
    capsys.readouterr()
    for hours, jobs in (("1", ["only=[pages_walk,pages_lookup]"]), ("0", ["only=pages_walk", "only=pages_lookup"])):
        assert main([*slurm_of, "dry=true", f"slurm.job_hours={hours}"]) == 0
        said = capsys.readouterr().out
        assert f"# {len(jobs)} jobs; each runs" in said and all(only in said for only in jobs), said
    assert main(slurm_of) == 0
    assert "1 jobs submitted (71)" in capsys.readouterr().err and noted(tmp_path) == ["71", "71"]

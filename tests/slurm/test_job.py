"""What a signal does to a job, with submitit's handlers and stand-ins for Slurm's programs; and in an image, to its script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from mmkv_bench.cli.verbs.run import SlurmJob
from mmkv_bench.config.compose import compose, launcher_of
from mmkv_bench.slurm.submission import ASK, REQUEUE, executor
from mmkv_bench.store.store import Store
from tests.each import each
from tests.run.setting import STAMPS, TIMES, done
from tests.slurm.stand_ins import stand_ins

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT)
QUESTION = "squeue -h -j 7_1 -o %T"
METHOD = """
from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from mmkv_bench.compression.scorers.base import Scorer

PID = {pid}


@dataclass(frozen=True)
class SignallingScorer(Scorer):
    def __post_init__(self):
        if {before}:
            os.kill(PID, signal.{number})

    def key(self, budget, length):
        return ()

    def score(self, obs, budget, seed):
        if PID is not None:
            os.kill(PID, signal.{number})
        return obs.key.float().norm(dim=-1)
"""


@pytest.fixture(scope="module")
def script_of_an_image(tmp_path_factory) -> str:
    node = replace(compose(["launcher=slurm"]).slurm, container="image.sqsh")
    launcher = launcher_of(["launcher=slurm", "out=rows"])
    return executor(launcher, node, tmp_path_factory.mktemp("image")).script(2)


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """The exit code of a job, task 1 of array 7, that gets a signal while it plans, or later, while it answers."""
    slurm, handlers = stand_ins(tmp_path / "slurm"), {number: signal.getsignal(number) for number in SIGNALS}
    for name, value in {"JOB_ID": "7", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    fresh = (tmp_path / str(number) for number in count())

    def run(number: str, image: bool = False, before: bool = False, state: str = "RUNNING"):
        slurm.put(asked="", state=state)
        folder = next(fresh)
        folder.mkdir()
        (folder / "method.py").write_text(METHOD.format(number=number, before=before, pid="os.getpid()"))
        method = ("method=[custom]", f"methods.custom.path={folder / 'method.py'}", "budget=16", "fidelity=off")
        job = SlurmJob(("model=tiny", "dataset=[pages_walk]", "limit=1", *method, f"out={folder / 'rows'}"))
        delayed = DelayedSubmission(job)
        delayed.set_timeout(240, 8)
        SlurmJobEnvironment()._handle_signals(JobPaths(folder, "7_1", 0), delayed)
        monkeypatch.setenv("PATH", str(folder) if image else f"{slurm.folder / 'bin'}:/usr/bin:/bin")
        with pytest.raises(SystemExit) as stopped:
            job()
        return stopped.value.code, slurm

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@each("number", ["SIGUSR1", "SIGUSR2"])
def test_a_user_signal_queues_a_job_again_also_where_no_sample_is_in_flight(ended, number):
    code, slurm = ended(number, before=True)
    assert code == -1 and slurm.lines("asked") == ["scontrol requeue 7_1"]
    code, slurm = ended(number, before=True, image=True)
    assert code == REQUEUE and slurm.lines("asked") == []


def test_a_user_signal_while_answering_queues_a_job_again(ended, capsys):
    code, slurm = ended("SIGUSR1")
    assert code == -1 and slurm.lines("asked") == ["scontrol requeue 7_1"]
    assert "ended by SIGUSR1 after the current sample, to be queued again" in capsys.readouterr().err


@pytest.mark.slow
@each(
    "image, state, wanted, words, asked",
    [
        (False, "RUNNING", -1, ", to be queued again", [QUESTION, "scontrol requeue 7_1"]),
        (False, "COMPLETING", 128 + signal.SIGTERM, ", not queued again, since it was cancelled", [QUESTION]),
        (True, "RUNNING", ASK, "; whether it was cancelled or preempted cannot be asked from this node", []),
    ],
)
def test_term_queues_a_job_again_where_slurm_has_its_own_task_as_running(
    ended, capsys, image, state, wanted, words, asked
):
    code, slurm = ended("SIGTERM", image=image, state=state)
    assert code == wanted and f"ended by SIGTERM after the current sample{words}" in capsys.readouterr().err
    assert slurm.lines("asked") == asked


@pytest.mark.full  # 45 s of CPU: two times two processes, which import torch; tests/cli/test_launch.py has the quick forms
def test_a_job_with_several_gpus_gives_each_a_process_and_is_queued_again_as_a_whole(
    ended, tmp_path, monkeypatch, capsys
):
    """Two GPUs by name, on a machine that has none: its processes compute on the CPU. One of them signals the job."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    stop = (
        tmp_path / f"stop{os.getpid()}"
    )  # a method file reads neither files nor variables, but may ask whether there is one
    parent = f"os.getppid() if os.path.exists('{tmp_path}/stop' + str(os.getppid())) else None"
    method = METHOD.format(number="SIGUSR2", before=False, pid=parent)
    (tmp_path / "method.py").write_text(method)
    asked = ("model=tiny", "model.device=cpu", "dataset=[pages_walk]", "limit=24", "method=[custom]", "budget=16")
    asked += (f"methods.custom.path={tmp_path / 'method.py'}", "fidelity=off", "shard=0/2", "stage=generate")
    run = "mmkv_bench.cli.verbs.run"
    monkeypatch.setattr(f"{run}._queue_again", lambda submitits, number, frame: sys.exit(REQUEUE))
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        stop.touch()
        job = SlurmJob((*asked, f"out={tmp_path / 'rows'}"), devices=2)
        with pytest.raises(SystemExit) as stopped:
            job()
        assert stopped.value.code == REQUEUE and "ended by SIGUSR2" in capsys.readouterr().err
        first = Store(tmp_path / "rows").responses(columns=["sample_id"]).num_rows
        stop.unlink()
        job()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    done(tmp_path / "alone", *asked[:1], *asked[2:])
    rows = [Store(tmp_path / name).responses() for name in ("rows", "alone")]
    same = [column for column in rows[0].column_names if column not in (*TIMES, *STAMPS)]
    assert rows[0].select(same).equals(rows[1].select(same)) and 0 < first < rows[0].num_rows
    assert len({*rows[0]["worker"].to_pylist()}) > 1, "both processes answered"
    logs = {path.name.partition("-process-")[2] for path in (tmp_path / "rows" / "logs").glob("job-*-0-process-*.log")}
    assert logs == {"0-of-2.log", "1-of-2.log"}, "a job of another shard writes to the same folder"
    with pytest.raises(SystemExit, match="2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        job()
    assert "requested 2 GPUs but sees none" in capsys.readouterr().err


@each(
    "code, state, restarts, again",
    [
        (0, "RUNNING", 0, False),
        (143, "RUNNING", 0, False),
        (REQUEUE, "RUNNING", 7, True),
        (REQUEUE, "RUNNING", 8, False),
        (ASK, "RUNNING", 99, True),  # preemption is no attempt
        (ASK, "COMPLETING", 0, False),
        (ASK, "", 0, False),
    ],
)
@each("array", [True, False])
def test_outside_of_an_image_a_script_queues_its_own_task_again_if_slurm_wants_it(
    script_of_an_image, tmp_path, code, state, restarts, again, array
):
    """srun signals the script, as preemption may, and ends as the job."""
    slurm = stand_ins(tmp_path / "slurm")
    slurm.put(state=state)
    (slurm.folder / "bin" / "srun").write_text(f"#!/bin/sh\nkill -TERM $PPID\nexit {code}\n")
    variables = {
        "PATH": f"{slurm.folder / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    if array:  # the last task of an array has the array's own id
        variables |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    name = "7_1" if array else "7"
    assert (
        subprocess.run(["bash", "-c", script_of_an_image], env=variables, capture_output=True, check=False).returncode
        == code
    )
    asked = [f"squeue -h -j {name} -o %T"] if code == ASK else []
    assert slurm.lines("asked") == asked + ([f"scontrol requeue {name}"] if again else [])

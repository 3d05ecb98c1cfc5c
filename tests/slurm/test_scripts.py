"""What a sweep on Slurm submits and refuses, as far as that is known without Slurm; and stop signals between samples."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess

import pytest

from mmkv_bench import signals
from mmkv_bench.cli.main import main
from mmkv_bench.config.compose import compose, launcher_of
from mmkv_bench.config.shorthand import words
from mmkv_bench.errors import ConfigError
from mmkv_bench.slurm import checks, submission
from tests.each import each
from tests.slurm.stand_ins import stand_ins

DRY = ("sweep", "launcher=slurm", "dry=true", "model=tiny", "dataset=[pages_walk,pages_lookup]", "limit=5")


@pytest.fixture(scope="module")
def launcher():
    return launcher_of(["launcher=slurm", "out=rows", "hydra.launcher.setup=[source /etc/profile]"])


def test_a_dry_sweep_prints_its_scripts_then_its_plan_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # there need be no Slurm
    flags = ("partition=gpu", "account=mine", "gres=gpu:a100:1", "array_parallelism=3")
    settings = [f"hydra.launcher.{flag}" for flag in flags]
    assert (
        main([*DRY, "shards=2", "out=rows", *settings, "hydra.launcher.additional_parameters={reservation: mine}"]) == 0
    )
    said = capsys.readouterr().out
    for flag in (
        "array=0-3%3",
        "partition=gpu",
        "account=mine",
        "gres=gpu:a100:1",
        "reservation=mine",
        "signal=USR2@120",
    ):
        assert f"#SBATCH --{flag}\n" in said
    assert "4 jobs" in said and "only=pages_lookup shard=1/2 stage=generate" in said
    assert (
        said.index("#SBATCH")
        < said.index("pages_walk_small, pages_lookup_small: each 5 samples, 5 with missing answers")
        < said.index("time at least")
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@each(
    "setting, reason",
    [
        ("hydra.launcher.timeout_min=10", "would never be queued again"),
        ("hydra.launcher.max_num_timeout=0", "would not be queued again"),
        ("hydra.launcher.tasks_per_node=2", "would answer the same samples"),
        ("stage=score", "needs only one process"),
        ("shard=0/2", "give shards=<number>"),
        ("shards=0", "is out of range"),
        ("slurm.job_hours=-1", "is out of range"),
        ("only=pages_wlak", "did you mean 'pages_walk'"),
    ],
)
def test_what_would_not_come_back_or_be_done_twice_is_refused_with_its_reason(setting, reason, capsys):
    assert main([*DRY, setting]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_where_a_program_of_slurms_is_missing_that_is_said_and_nothing_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    slurm = stand_ins(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(slurm.folder / "bin"))
    for name in ("srun", "sinfo", "scontrol", "squeue", "sbatch"):
        (slurm.folder / "bin" / name).unlink()
        assert main([*DRY, "dry=false", "out=rows"]) == 2
        assert f"needs {name}, which is not on PATH" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["slurm"]


def test_keys_of_a_sweep_are_refused_where_there_is_none(capsys):
    assert main(["shards=2"]) == main(["dry=true"]) == main(["sweep", "shards=2"]) == 2
    assert capsys.readouterr().err.count("only affects a sweep") == 3


def test_modules_images_and_flags_of_srun_are_in_the_script(launcher, tmp_path):
    def script(**keys):
        slurm = compose(["launcher=slurm", *words({f"slurm.{key}": value for key, value in keys.items()})]).slurm
        return submission.executor(launcher, slurm, tmp_path).script(1)

    plain = script(modules=["cuda/12.4", "gcc"], srun=["--cpu-bind=cores"])
    assert plain.index("module load cuda/12.4 gcc\n") < plain.index("source /etc/profile\n") < plain.index("\nsrun ")
    assert "--cpu-bind=cores" in plain and "scontrol" not in plain and "array" not in plain
    pyxis = script(container="image.sqsh", mounts="/data")
    assert f"--container-image=image.sqsh --container-mounts={tmp_path}:{tmp_path},/data:/data python -u" in pyxis
    apptainer = script(container="image.sif", runtime="apptainer", mounts=["/data:/inside"], python="python3.11")
    assert f"apptainer exec --nv --bind {tmp_path}:{tmp_path},/data:/inside image.sif python3.11 -u" in apptainer
    for text in (pyxis, apptainer):  # no scontrol in an image: queued again from outside of it
        assert 'scontrol requeue "$job"' in text.partition("\nsrun ")[2]
    mine = script(container="image.sqsh", modules=["gcc"])
    assert mine.index("trap : TERM\n") < mine.index("module load gcc\n") < mine.index("source /etc/profile\n")


def test_a_setup_line_that_fails_ends_the_job_before_its_work(launcher, tmp_path):
    """With bash and an srun that ends with 7: its code is the job's, and it is not reached where a line fails."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho started; exit 7\n")
    (tmp_path / "srun").chmod(0o755)
    for keys, setup, code, line in (
        ({}, ["export A=1", "false || true"], 7, None),
        ({"modules": ["cuda"]}, [], 127, "module load cuda"),
        ({"container": "image.sqsh"}, ["source /no/such/profile"], 1, "source /no/such/profile"),
    ):
        slurm = compose(["launcher=slurm", *words({f"slurm.{key}": value for key, value in keys.items()})]).slurm
        own = launcher | {"setup": setup}
        script = submission.executor(own, slurm, tmp_path).script(1)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert (ended.returncode, "started" in ended.stdout) == (code, line is None), ended
        said = ended.stderr.splitlines()[-1] if line else None
        assert said == (line and f"mmkv_bench: the job ends without work: its script failed at: {line}")


@pytest.mark.slow
def test_a_model_may_ask_for_more_than_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = (
        "sweep",
        "launcher=slurm",
        "dry=true",
        "model=tiny,hf",
        "model.path=pkg://mmkv_bench/tiny/weights",
        "limit=2",
    )
    more = "slurm.models={hf: {gpus_per_node: 4, timeout_min: 600}}"
    for spread, split in (((), True), (("model.device_map=auto",), False), (("model.device=cpu",), False)):
        assert main([*words, *spread, "out=rows", more]) == 0
        first, second = capsys.readouterr().out.split("#!/bin/bash")[1:]
        assert "by a process for each" not in first
        assert ("each runs mmkv-bench, by a process for each of 4 GPUs, with" in second) == split
    assert "--gpus-per-node=1\n" in first and "--time=240\n" in first and "model=tiny" in first
    assert "--gpus-per-node=4\n" in second and "--time=600\n" in second and "model=hf" in second
    for wrong, reason in (
        ("gpus: 4", "not a key of hydra.launcher"),
        ("timeout_min: 5", "would never be queued again"),
    ):
        assert main([*words, f"slurm.models={{hf: {{{wrong}}}}}"]) == 2
        assert reason in capsys.readouterr().err


def test_a_stop_signal_waits_for_the_sample_in_flight():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    for number in signals.SIGNALS:
        done = []
        with pytest.raises(signals.Stopped) as stopped, signals.defer_stop_signals():
            for sample in range(3):
                if sample == 1:
                    os.kill(os.getpid(), number)
                done.append(sample)
                signals.check_stop()
        assert done == [0, 1] and stopped.value.signal == number
        with pytest.raises(signals.Stopped), signals.defer_stop_signals():  # after the last check
            os.kill(os.getpid(), number)
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def test_a_folder_that_jobs_cannot_share_is_refused(tmp_path, monkeypatch):
    slurm = stand_ins(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{slurm.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    checks.check_folder(tmp_path / "rows")
    assert not any((tmp_path / "rows").iterdir())

    def fails(number):
        def call(*_, **__):
            raise OSError(number, os.strerror(number))

        return call

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="has no locks"):
        patch.setattr(fcntl, "flock", fails(errno.ENOLCK))
        checks.check_folder(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="cannot replace a file by a locked file"):
        patch.setattr(os, "replace", fails(errno.EXDEV))
        checks.check_folder(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="node7 and other nodes do not see"):
        patch.setattr(checks, "_file_system", lambda _: "tmpfs")
        checks.check_folder(tmp_path)
    assert not any(path.name.startswith(".probe") for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_sweep_opens_no_data_and_counts_the_prefills_of_comma_lists(tmp_path, monkeypatch, capsys):
    """DocVQA is not on this machine: only `lacking` says so, with no advice to leave the site's offline mode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = ("method=snapkv,mmshift", "budget=64,128", "limit=5")
    for where, jobs in (("launcher=slurm", 8), ("launcher=local", 4)):
        shards = ["shards=2"] if where == "launcher=slurm" else []
        assert main(["sweep", where, "dry=true", "model=qwen2_5_vl_7b", "dataset=docvqa", *cells, *shards]) == 0
        said = capsys.readouterr().out
        assert said.count("shard=") == (jobs if shards else 0) and said.count("measured   no rate") == 4
        assert "missing    data: " in said and "hf download --repo-type dataset lmms-lab" in said
        assert "unset" not in said and "prefills   20 prompts in 4 runs\n           5 with lists" in said
        assert "'method=[snapkv,mmshift]' 'budget=[64,128]'\n" in said
    assert not any(tmp_path.iterdir())


def test_gpus_of_a_job_are_counted_in_every_spelling_of_gres():
    for gres, gpus in {
        "gpu": 1,
        "gpu:4": 4,
        "gpu:a100": 1,
        "gpu:a100:4": 4,
        "lustre:1,gpu:2": 2,
        "gpu:a:1,gpu:b:2": 3,
        None: 0,
    }.items():
        assert checks.gpus_of({"gres": gres, "gpus_per_node": None}) == gpus, gres
    assert checks.gpus_of({"gres": None, "gpus_per_node": 8}) == 8

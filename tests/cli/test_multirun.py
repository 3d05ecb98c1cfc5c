"""`-m` runs one job after the other; single runs and printing flags leave no trace of Hydra."""

from __future__ import annotations

import os
from itertools import chain

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.errors import DataError

HUB = ("model=hf", "model.path=org/name")


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The configurations that were handed to the runner, in an otherwise empty folder."""
    import mmkv_bench.run.run as runner

    monkeypatch.chdir(tmp_path)
    seen = []

    def run(config):
        seen.append(config)
        if config.budget == (13,):
            raise DataError("thirteen is not a dataset")
        if config.budget == (14,):
            raise RuntimeError("nobody foresaw fourteen")
        return 1 if config.budget == (17,) else 0

    monkeypatch.setattr(runner, "run", run)
    return seen


def test_a_single_run_makes_no_folder_and_stays_where_it_is(ran, tmp_path):
    assert main([*HUB, "budget=16"]) == 0
    assert [config.budget for config in ran] == [(16,)]
    assert os.getcwd() == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_of_a_run_is_the_commands(ran):
    assert main([*HUB, "budget=17"]) == 1
    assert main([*HUB, "budget=13"]) == 1


@pytest.mark.full
def test_every_job_of_a_sweep_runs(ran, tmp_path):
    assert main(["-m", *HUB, "budget=16,32", "seed=range(0,2)", "out=rows"]) == 0
    assert [(*config.budget, *config.seed) for config in ran] == [(16, 0), (16, 1), (32, 0), (32, 1)]
    assert list(tmp_path.iterdir()) == []


def test_keys_of_the_users_own_reach_every_job(ran):
    overrides = ["variants.g3={base: mmshift, gamma: 3}", "methods.mmshift.reading=released", "retry=nan"]
    assert main(["-m", *HUB, "budget=16,32", *overrides]) == 0
    for config in ran:
        assert config.variants["g3"]["gamma"] == 3
        assert config.methods["mmshift"]["reading"] == "released"
        assert list(config.retry) == ["nan"]


@pytest.mark.full
def test_every_job_knows_the_further_config_folder(ran, tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nlimit: 5\n")
    assert main(["-m", "--config-dir", str(folder), *HUB, "experiment=mine", "budget=16,32"]) == 0
    assert [(config.limit, list(config.folders)) for config in ran] == [(5, [str(folder)])] * 2


def test_a_job_that_fails_is_reported_and_the_others_run(ran, capsys):
    assert main(["-m", *HUB, "budget=13,14,17,32"]) == 1
    assert [*chain(*(config.budget for config in ran))] == [13, 14, 17, 32]
    err = capsys.readouterr().err
    assert "budget=13 failed with exit code 1: thirteen is not a dataset" in err
    assert "budget=14 failed with exit code 1: RuntimeError: nobody foresaw fourteen" in err
    assert "budget=17 failed with exit code 1" in err
    assert err.count("Traceback") == 1, "of the fault that is none of the user's"


@pytest.mark.slow
def test_settings_of_hydra_itself_are_refused(ran, capsys):
    assert main(["-m", *HUB, "budget=16,32", "hydra.sweep.dir=elsewhere"]) == 2
    assert ran == []
    assert "only affects jobs on Slurm" in capsys.readouterr().err


def test_nothing_starts_when_one_job_cannot_run(ran, capsys):
    assert main(["-m", *HUB, "budget=16,0"]) == 2
    assert ran == []
    assert "budget=0 of 2" in capsys.readouterr().err


def test_the_configuration_can_be_printed(ran, tmp_path, capsys):
    assert main(["--cfg", "job", *HUB, "variants.w8={base: snapkv, window: 8}"]) == 0
    out = capsys.readouterr().out
    assert "window: 8" in out
    assert "path: org/name" in out
    assert ran == []
    assert list(tmp_path.iterdir()) == []

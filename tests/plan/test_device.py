"""A GPU that is asked for and not there: what the run would need is said before any work."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.cli.main import main
from mmkv_bench.devices import kind_of
from mmkv_bench.devices.requirements import sign_of_gpu
from mmkv_bench.errors import ConfigError
from mmkv_bench.models.load import device_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.full
def test_without_a_gpu_the_gpu_run_says_what_it_needs(capsys, tmp_path):
    assert main(["experiment=gpu", f"out={tmp_path / 'rows'}"]) == 2
    said = capsys.readouterr().err
    assert "no CUDA device" in said and "more than 15.4 GiB" in said and "model.layers=2 model.device=cpu" in said
    assert not (tmp_path / "rows").exists()


def test_a_model_without_a_shape_is_offered_no_shrunk_form(capsys, tmp_path):
    assert main(["model=tiny", "dataset=pages_walk", "device=gpu", f"out={tmp_path / 'rows'}"]) == 2
    assert capsys.readouterr().err.strip().endswith("allowed here: cpu, auto; write model.device=cpu")


def test_auto_and_a_wanted_gpu_come_to_cpu_where_there_is_none():
    assert {kind_of(setting) for setting in ("auto", "cpu", "cuda")} == {"cpu"}


def test_signs_of_a_gpu_are_slurms_grants_visible_devices_and_nvidias_files():
    for environment, files, sign in (
        ({}, ["null", "kfd", "dxg", "nvidia-caps"], None),
        ({}, ["nvidia0", "nvidiactl"], "/dev/nvidia0"),
        ({"SLURM_JOB_GPUS": "0"}, [], "SLURM_JOB_GPUS=0"),
        ({"SLURM_GPUS_ON_NODE": "0"}, [], None),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}, [], "SLURM_GPUS_ON_NODE=2"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, [], "CUDA_VISIBLE_DEVICES=0,1"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], None),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], None),
    ):
        assert sign_of_gpu(environment, files) == sign


def test_auto_is_no_cpu_where_a_gpu_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_GPUS", "0")
    words = ["model=tiny", "method=[full]", f"out={tmp_path}"]
    asks = ["dataset=[pages_walk]", "limit=1"]
    for verb in (["run", *asks], ["launch", "--processes", "2", *asks], ["run", "scenario=efficiency", "lengths=[64]"]):
        assert main([*verb, *words]) == 2, verb
        said = capsys.readouterr().err.splitlines()[-1]
        assert "torch sees no GPU (torch " in said and "although SLURM_JOB_GPUS=0 says" in said
        assert "or write model.device=cpu" in said
    assert not list(tmp_path.rglob("*.parquet")) and not (tmp_path / "logs").exists()
    with pytest.raises(ConfigError, match="meant to have one"):
        device_of("auto")  # by which calibrate, diagnose, verify and measurements of a device load
    assert device_of("cpu").type == "cpu"

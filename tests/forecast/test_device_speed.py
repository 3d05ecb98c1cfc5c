"""Promise: a device is measured once, its file is found again without torch, and no measurement exceeds what was done."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mmkv_bench.cli.main import main
from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import replace_json
from mmkv_bench.forecast import device_speed
from mmkv_bench.forecast.device_speed import DeviceSpeed
from tests.cli.setting import CHECKOUT

SPEED = DeviceSpeed("NVIDIA H100 80GB HBM3", "cuda", 8, 3e12, {"bfloat16": 7e14}, 80 * 2**30, "2.13.0", "2026-11-22")


def test_a_device_is_measured_once_and_known_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    calls, own, asked = [], device_speed.measure, device_speed.speed_of_device
    monkeypatch.setattr(device_speed, "_LEAST_S", 0.01)
    monkeypatch.setattr(device_speed, "measure", lambda device: (calls.append(device), own(device, 1 << 22, 64))[1])
    first = asked("cpu")
    assert asked("cpu") == first == device_speed.stored_speeds()[first.slug]
    words = ["plan", f"out={tmp_path}/rows", "method=full", "limit=1"]
    assert main(words) == 0 and len(calls) == 1
    assert main([*words, "--measure", "cpu"]) == 0 and len(calls) == 2
    assert first.kind == "cpu" and first.threads == torch.get_num_threads() and first.slug.endswith("-threads")
    assert first.bandwidth > 1e8 and set(first.rates) == {"float32", "bfloat16"} and min(first.rates.values()) > 1e7
    assert f"{first.threads} threads" in capsys.readouterr().out


def test_a_device_measured_under_a_clearly_higher_load_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    name = device_speed.device_name("cpu")
    made = dataclasses.replace(SPEED, name=name, kind="cpu", threads=torch.get_num_threads(), load=0.2)
    monkeypatch.setattr(device_speed, "measure", lambda place: made)
    monkeypatch.setattr(device_speed, "_load", lambda: 0.2)
    for load, again in ((2.8, True), (0.9, False), (None, False)):
        before = dataclasses.replace(made, load=load, bandwidth=1.0)
        device_speed.save(before)
        assert device_speed.speed_of_device("cpu") == (made if again else before), load
    values = json.loads(device_speed.save(made).read_text())
    del values["load"]  # of an older version
    (device_speed.folder() / f"{made.slug}.json").write_text(json.dumps(values))
    assert device_speed.stored_speeds()[made.slug].load is None


def test_the_best_round_counts_and_its_calls_are_divided(monkeypatch):
    """A clock of our own: a call takes 2 ms, in one of the rounds 1 ms; three calls a round at least."""
    now, took, rounds = [0.0], [0.002], iter([0.002, 0.002, 0.002, 0.002, 0.001])
    clock = SimpleNamespace(now=lambda: now[0])
    monkeypatch.setattr(device_speed, "_LEAST_S", 0.03)
    own, calls = device_speed._round, []

    def run():
        now[0] += took[0]

    def one(run, count, device):
        took[0] = next(rounds, 0.002)
        calls.append(count)
        return own(run, count, device)

    monkeypatch.setattr(device_speed, "_round", one)
    assert device_speed._seconds(run, clock) == pytest.approx(0.001)
    assert calls[:3] == [1, 2, 4] and set(calls[2:]) == {4}


def test_a_dtype_that_a_processor_computes_slowly_is_measured_with_narrow_matrices(monkeypatch):
    """Products of 2 w^3 operations at a made-up rate; the width of each is that of its result."""
    device, widths = SimpleNamespace(place=torch.device("cpu")), []

    def seconds(run, device):
        widths.append(len(run()))
        return 2 * widths[-1] ** 3 / rate

    monkeypatch.setattr(device_speed, "_seconds", seconds)
    for rate, expected in ((1e12, [256, 512, 600]), (1e9, [256, 512])):
        widths.clear()
        assert device_speed._rate(device, torch.float32, 600) == pytest.approx(rate)
        assert widths == expected


def test_stored_devices_are_read_without_torch_and_damaged_files_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    assert main(["plan", "--devices"]) == 0
    assert "no device was measured yet" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="none was measured"):
        device_speed.stored_speed("nvidia-h100-80gb-hbm3")
    file = device_speed.save(SPEED)
    assert device_speed.stored_speed("nvidia-h100-80gb-hbm3") == SPEED
    with pytest.raises(ConfigError, match="did you mean 'nvidia-h100-80gb-hbm3'"):
        device_speed.stored_speed("nvidia-h100-80gb-hbm")
    values = json.loads(file.read_text())
    for number, damaged in enumerate(
        ["", "[]", json.dumps(values | {"scheme": 9}), json.dumps(values | {"bandwidth": 0}), json.dumps({"scheme": 1})]
    ):
        (file.parent / f"damaged-{number}.json").write_text(damaged)
    assert list(device_speed.stored_speeds()) == [SPEED.slug]
    start = "import sys; from mmkv_bench.cli.main import main"
    code = f"{start}; main(['plan', '--devices', '--json']); print('torch' in sys.modules)"
    environment = CHECKOUT | {"MMKV_BENCH_CACHE": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    document, heavy = ended.stdout.splitlines()
    assert heavy == "False" and json.loads(document) == [dataclasses.asdict(SPEED) | {"device": SPEED.slug}]


@pytest.mark.slow
def test_a_plan_takes_the_only_measured_device_of_the_kind_that_computes(tmp_path, monkeypatch, capsys):
    """A login node's CPU made the hours of a sweep on GPUs."""
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("mmkv_bench.devices.requirements.sign_here", lambda: None)
    words = ("model=tiny", "method=snapkv", "dataset=[pages_walk]", "limit=1", f"out={tmp_path / 'rows'}")
    cpu = dataclasses.replace(SPEED, name="Xeon", kind="cpu", rates={"float32": 1e12})
    slurm = ("launcher=slurm", "hydra.launcher.partition=any")
    for stored, ways in (
        ((cpu,), {("plan",): cpu, ("plan", *slurm): None, ("plan", *slurm, "hydra.launcher.gpus_per_node=0"): cpu,
                  ("plan", "model.device=cuda"): None, ("plan", *slurm, "model.device=cpu"): cpu,
                  ("sweep", "dry=true", *slurm): None}),
        ((cpu, SPEED), {("plan",): None, ("plan", *slurm, "hydra.launcher.gres=gpu"): SPEED, ("plan", "model.device=cpu"): cpu}),
    ):  # fmt: skip
        for speed in stored:
            device_speed.save(speed)
        for way, speed in ways.items():
            assert main([*way, *words]) == 0
            shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("device "))
            assert shown.split(None, 1)[1].partition(":")[0] == (speed.slug if speed else "unknown"), way


def test_what_cannot_be_written_as_json_leaves_the_file_and_its_folder_as_they_were(tmp_path):
    replace_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        replace_json(tmp_path / "a.json", {"a": object()})
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == '{"a": 1}'

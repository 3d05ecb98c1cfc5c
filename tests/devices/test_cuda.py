"""What the CUDA device object reads of nvidia-smi, and says where there is no such device."""

from __future__ import annotations

import os

import pytest
import torch

from mmkv_bench import devices
from mmkv_bench.devices import Cuda, cuda, smi

without = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@without
def test_without_a_device_none_is_counted_and_the_host_is_taken():
    assert Cuda.count() == 0
    assert {devices.kind_of(setting) for setting in ("auto", "cpu", "cuda")} == {"cpu"}


def test_every_kind_has_its_object_and_the_host_answers_for_unknown_ones():
    assert type(devices.at("cuda:1")) is Cuda and devices.at("cuda:1").place == torch.device("cuda", 1)
    assert type(devices.at(torch.device("cpu"))) is devices.Host and type(devices.at("meta")) is devices.Host
    assert devices.at("cuda").memory is not None and devices.at("cpu").memory is None


def test_kernels_run_on_a_cuda_device_where_triton_and_a_c_compiler_are(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler = tmp_path / "clang"
    for installed, there, runs in [(True, False, False), (True, True, True), (False, True, False)]:
        monkeypatch.setattr("mmkv_bench.devices.cuda.find_spec", lambda name, found=installed: found or None)
        if there:
            compiler.write_text("#!/bin/sh\n")
            compiler.chmod(0o755)
        cuda._has_triton.cache_clear()
        assert devices.at("cuda").fuses is runs and not devices.at("cpu").fuses
    cuda._has_triton.cache_clear()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """An nvidia-smi that prints what a test says, behind what it was asked."""

    def write(text: str, code: int = 0) -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nprintf "{text}"\nexit {code}\n')
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    write.asked = lambda: (tmp_path / "asked").read_text().split()
    return write


def test_others_on_the_device_are_known_where_one_sees_oneself(program):
    for said, others in [("17\\n40\\n", (40,)), ("17\\n", ()), ("40\\n", None), ("", None), ("[N/A]\\n", None)]:
        program(said)
        assert smi.foreign(smi.asked("compute-apps=pid", "GPU-1"), 17) == others, said
    assert program.asked() == ["--query-compute-apps=pid", "--format=csv,noheader,nounits", "--id=GPU-1"]


def test_a_clock_that_is_held_down_has_its_reasons(program):
    for said, reasons in [
        ("0x0000000000000000\\n", ()),
        ("0x0000000000000001\\n", ()),
        ("0x0000000000000024\\n", ("software power cap", "software thermal slowdown")),
        ("0x0000000000010040\\n", ("hardware thermal slowdown", "unknown reason 0x10000")),
        ("[N/A]\\n", None),
        ("", None),
    ]:
        program(said)
        assert smi.reasons(smi.asked("gpu=clocks_throttle_reasons.active", "GPU-1")) == reasons, said


def test_a_program_that_fails_or_is_missing_tells_nothing(program, monkeypatch):
    program("17\\n", code=6)
    assert smi.asked("compute-apps=pid", "GPU-1") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert smi.asked("compute-apps=pid", "GPU-1") is None
    assert smi.foreign(None, 17) is None and smi.reasons(None) is None


@pytest.mark.parametrize(("value", "waits"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_waiting_for_every_launch_is_noticed_beside_cuda_only(monkeypatch, value, waits):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    assert devices.at("cuda").waits_for_launches() is waits
    assert devices.at("cpu").waits_for_launches() is False

"""What the CUDA device object reads of nvidia-smi, and says where there is no such device."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from mmkv_bench import devices
from mmkv_bench.devices import Cuda, cuda

without = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@without
def test_without_a_device_none_is_counted_and_the_host_is_taken():
    assert Cuda.count() == 0
    assert {devices.kind_of(setting) for setting in ("auto", "cpu", "cuda")} == {"cpu"}


def test_every_kind_has_its_object_and_the_host_answers_for_unknown_ones():
    assert type(devices.at("cuda:1")) is Cuda and devices.at("cuda:1").place == torch.device("cuda", 1)
    assert type(devices.at(torch.device("cpu"))) is devices.Device and type(devices.at("meta")) is devices.Device
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
        assert cuda.foreign(cuda.nvidia_smi("compute-apps=pid", "GPU-1"), 17) == others, said
    assert program.asked() == ["--query-compute-apps=pid", "--format=csv,noheader,nounits", "--id=GPU-1"]


def test_a_clock_that_is_held_down_has_its_reasons(program):
    for said, reasons in [
        ("0x0000000000000000\\n", ()),
        ("0x0000000000000001\\n", ()),
        ("0x0000000000000002\\n", ()),  # a site's setting
        ("0x0000000000000024\\n", ("software power cap", "software thermal slowdown")),
        ("0x0000000000010040\\n", ("hardware thermal slowdown", "unknown reason 0x10000")),
        ("[N/A]\\n", None),
        ("", None),
    ]:
        program(said)
        assert cuda.reasons(cuda.nvidia_smi("gpu=clocks_throttle_reasons.active", "GPU-1")) == reasons, said


def test_a_program_that_fails_or_is_missing_tells_nothing(program, monkeypatch):
    program("17\\n", code=6)
    assert cuda.nvidia_smi("compute-apps=pid", "GPU-1") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert cuda.nvidia_smi("compute-apps=pid", "GPU-1") is None
    assert cuda.foreign(None, 17) is None and cuda.reasons(None) is None


@pytest.mark.parametrize(("value", "waits"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_waiting_for_every_launch_is_noticed_beside_cuda_only(monkeypatch, value, waits):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    assert devices.at("cuda").waits_for_launches() is waits
    assert devices.at("cpu").waits_for_launches() is False


@pytest.fixture
def stubbed(monkeypatch) -> list[tuple]:
    """torch's own Python around C calls that only note what they were given; one device of 80 GiB, number 3."""
    calls: list[tuple] = []
    stats = {
        "allocated_bytes": {"all": {"current": 5, "peak": 7}},
        "reserved_bytes": {"all": {"current": 8, "peak": 9}},
    }

    def note(name, value=None):
        monkeypatch.setattr(torch._C, name, lambda *given: calls.append((name, *given)) or value, raising=False)

    note("_cuda_getDeviceCount", 4)
    note("_cuda_getDevice", 3)
    note("_cuda_memoryStats", stats)
    for name in ("_cuda_setMemoryFraction", "_cuda_emptyCache", "_cuda_resetPeakMemoryStats", "_cuda_synchronize"):
        note(name)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    properties = SimpleNamespace(total_memory=80 << 30, uuid="1-2", name="a device")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place=None: properties)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: calls.append(("exchange", index)) or index)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: index)
    return calls


def test_a_memory_limit_is_set_on_the_device_that_is_used_whether_it_is_numbered_or_not(stubbed):
    """Every counting pass of memory_limit was an error: torch takes no device without a number there."""
    assert Cuda.here() == torch.device("cuda", 3)
    for place, number in (("cuda", 3), ("cuda:1", 1)):
        stubbed.clear()
        device = Cuda(torch.device(place))
        with device.counted(limit=20 << 30) as memory:
            assert (memory.held(), memory.peak()) == (devices.Bytes(5, 8), devices.Bytes(7, 9))
            memory.restart()
        limits = [call for call in stubbed if call[0] == "_cuda_setMemoryFraction"]
        assert limits == [("_cuda_setMemoryFraction", 0.25, number), ("_cuda_setMemoryFraction", 1.0, number)]
        assert ("_cuda_resetPeakMemoryStats", number) in stubbed
        device.synchronise()
        assert device.total_bytes() == 80 << 30 and device._identity() == "GPU-1-2"

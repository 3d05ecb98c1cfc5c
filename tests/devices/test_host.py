"""The device object of the host, and what the meter makes of it."""

from __future__ import annotations

import threading

import pytest
import torch

from mmkv_bench import devices
from mmkv_bench.devices import Bytes, Counters
from mmkv_bench.devices.device import cores
from mmkv_bench.generation.meter import Meter

FLOAT = 4
HOST = devices.at("cpu")


def test_live_storages_are_counted_until_the_last_tensor_that_looks_at_them_is_gone():
    weights = torch.zeros(1000)
    with HOST.counted([weights, weights[:10]]) as memory:
        assert memory.held() == Bytes(1000 * FLOAT)
        whole = torch.ones(500)
        part, turned = whole[:3], whole.view(50, 10).T
        assert memory.held().allocated == 1500 * FLOAT
        copy = turned.contiguous()
        copy.add_(1).mul_(2)
        assert memory.held().allocated == 2000 * FLOAT
        del whole, turned
        assert memory.held().allocated == 2000 * FLOAT and part.sum() == 3
        del part, copy
        assert memory.held().allocated == 1000 * FLOAT
        assert memory.peak().allocated >= 2000 * FLOAT
        memory.restart()
        assert memory.peak() == memory.held() == Bytes(1000 * FLOAT)


def test_the_peak_of_a_product_of_matrices_is_what_it_holds_at_once():
    a, b = torch.randn(64, 32), torch.randn(32, 128)
    with HOST.counted([a, b]) as memory:
        result = (a @ b).relu().sum(-1)
    inputs = (64 * 32 + 32 * 128) * FLOAT
    assert memory.peak().allocated == inputs + 2 * 64 * 128 * FLOAT
    assert memory.held().allocated == inputs + result.nbytes


def test_counting_changes_no_number_and_ends_with_its_block():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 16), torch.randn(3, 16)
    expected = layer(x)
    with HOST.counted(layer.parameters()) as memory:
        assert torch.equal(layer(x), expected)
    peak = memory.peak()
    torch.ones(10**6)
    assert memory.peak() == peak


def test_marks_of_the_host_are_seconds_of_its_clock():
    start, before = HOST.mark(), HOST.now()
    after, end = HOST.now(), HOST.mark()
    assert HOST.between(start, end) >= after - before >= 0


def test_random_numbers_go_on_after_a_block_of_their_own():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(2)
    with HOST.forked_random():
        torch.manual_seed(99)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)


def test_host_buffers_are_plain_memory_beside_the_host():
    buffer = HOST.host_buffer(3, 5, dtype=torch.bfloat16)
    assert buffer.shape == (3, 5) and buffer.dtype == torch.bfloat16 and buffer.device == HOST.place


@pytest.mark.parametrize(
    ("said", "granted"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("x", 8), (None, 8)]
)
def test_cores_are_those_of_the_affinity_within_the_quota(tmp_path, monkeypatch, said, granted):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    if said is not None:
        quota.write_text(said)
    assert cores(quota) == granted


def test_threads_are_never_more_than_cores(monkeypatch):
    asked = torch.get_num_threads()
    for there, granted in ((asked + 1, asked), (asked, asked), (asked - 1, asked - 1)):
        monkeypatch.setattr("mmkv_bench.devices.device.cores", lambda there=there: there)
        assert HOST.threads() == granted


class Scripted(Counters):
    """Memory whose level a test sets."""

    def __init__(self):
        self.level = self.most = 0

    def to(self, level: int) -> None:
        self.level, self.most = level, max(self.most, level)

    def held(self) -> Bytes:
        return Bytes(self.level, 2 * self.level)

    def peak(self) -> Bytes:
        return Bytes(self.most, 2 * self.most)

    def alike(self, one, other) -> None: ...

    def restart(self) -> None:
        self.most = self.level


def test_a_phase_has_the_most_that_was_held_while_it_lasted_and_no_phase_what_happens_aside():
    memory = Scripted()
    memory.to(50)
    memory.to(10)
    meter = Meter(HOST.place, memory)
    with meter.phase("prefill"):
        memory.to(30)
        memory.to(20)
        with meter.phase("vision"):
            memory.to(25)
            memory.to(15)
        memory.to(28)
    memory.to(5)
    with meter.aside():
        memory.to(100)
        memory.to(6)
    with meter.phase("decode"):
        memory.to(7)
    with meter.phase("vision"):
        memory.to(26)
    assert meter.peaks == {"prefill": Bytes(30, 60), "vision": Bytes(26, 52), "decode": Bytes(7, 14)}
    assert meter.peak_device() == 30
    assert set(meter.seconds) == {"prefill", "vision", "decode"}


def test_without_counters_a_meter_has_the_resident_set_alone():
    meter = Meter(HOST.place)
    with meter.phase("all"):
        pass
    assert meter.peak_device() is None and meter.peaks == {} and meter.peak_resident() > 2**20


def test_storages_freed_by_another_thread_are_counted_too():
    with HOST.counted() as memory:
        made = [torch.ones(10)]
        thread = threading.Thread(target=made.clear)
        thread.start()
        thread.join()
        assert memory.held().allocated == 0

"""A device's speed that was measured before, so that no test measures one; and a cache folder of the session's own."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.forecast.device_speed import DeviceSpeed, save
from mmkv_bench.store.provenance import device_name

BANDWIDTH, RATE = 2e10, 5e10


@pytest.fixture(scope="package", autouse=True)
def _speed(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("MMKV_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    rates = {"float32": RATE}
    for threads in {1, torch.get_num_threads()}:  # a small model has one where nobody says otherwise
        save(DeviceSpeed(device_name("cpu"), "cpu", threads, BANDWIDTH, rates, 1 << 34, "2", "2026-11-22"))
    yield
    patch.undo()

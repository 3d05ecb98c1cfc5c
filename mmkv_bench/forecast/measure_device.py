"""Measures what a device allows: read-only memory bandwidth and the rate of large products. Seconds, once per device.

Bandwidth is that of the fastest of three passes that read a block far larger than any cache and write next to nothing; a copy
is none of them, since it writes what it reads and so reaches about half. Of several rounds the best counts: what disturbs a
round only ever makes it slower, and a limit is what nothing exceeds.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch

from mmkv_bench import devices
from mmkv_bench.devices import Device
from mmkv_bench.forecast.device_speed import DeviceSpeed, save, slug_of, stored
from mmkv_bench.models.load import device_of
from mmkv_bench.store.provenance import device_name

_BLOCK = {"cpu": 1 << 29, "cuda": 1 << 32}  # bytes; at most an eighth of the memory
_WIDTH = {"cpu": 2048, "cuda": 8192}  # of the square matrices
_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
_ROUNDS, _LEAST_S = 5, 0.3
_COLUMNS = 4096


def measured(setting: str, again: bool = False) -> DeviceSpeed:
    """The speed of a device of this machine: as stored, else measured now and stored; measured again where it
    was under a clearly higher load than now.

    Args:
        setting: `cpu`, `cuda`, or `auto`; again: measure in any case.

    Raises:
        ConfigError: no such device here, a cache that cannot be written.
    """
    place = device_of(setting)
    kind = devices.at(place).kind
    known = stored().get(slug_of(device_name(str(place)), kind, torch.get_num_threads()))
    if known is not None and not again and not _disturbed(known):
        return known
    speed = measure(place)
    save(speed)
    return speed


def _disturbed(known: DeviceSpeed) -> bool:
    """It was measured beside one more busy processor than there is now, or several; an unknown load is none."""
    now = _load()
    return known.load is not None and now is not None and known.load > now + 1


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def measure(place: torch.device, block: int | None = None, width: int | None = None) -> DeviceSpeed:
    """Measure it with as many threads as torch has now.

    Args:
        block: bytes that are read; width: of the square matrices. Less than the defaults is faster and says less.
    """
    device = devices.at(place)
    kind, memory, load = device.kind, device.total_bytes(), _load()
    block = min(block or _BLOCK[kind], memory // 8)
    return DeviceSpeed(
        name=device_name(str(place)),
        kind=kind,
        threads=torch.get_num_threads(),
        bandwidth=_bandwidth(device, block),
        rates={name: _rate(device, getattr(torch, name), width or _WIDTH[kind]) for name in _DTYPES[kind]},
        memory_bytes=memory,
        torch=torch.__version__,
        measured=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        load=load,
    )


def _bandwidth(device: Device, block: int) -> float:
    """Bytes per second."""
    x = torch.ones(max(1, block // 4 // _COLUMNS), _COLUMNS, device=device.place)
    ones = torch.ones(_COLUMNS, device=device.place)
    read: tuple[Callable[[], object], ...] = (x.sum, x.amax, lambda: torch.mv(x, ones))
    return x.numel() * x.element_size() / min(_seconds(one, device) for one in read)


def _rate(device: Device, dtype: torch.dtype, width: int) -> float:
    """Operations per second, of random numbers: with constant ones a GPU takes less power and clocks higher."""
    draw = torch.Generator(device.place).manual_seed(0)
    a, b = (torch.randn(width, width, generator=draw, device=device.place, dtype=dtype) for _ in range(2))
    return 2 * width**3 / _seconds(lambda: torch.mm(a, b), device)


def _seconds(run: Callable[[], object], device: Device) -> float:
    """The least time of one call, over rounds of as many as take long enough to be timed."""
    run()
    calls, best = 1, float("inf")
    while (taken := _round(run, calls, device)) < _LEAST_S / _ROUNDS:
        calls *= 2
    for _ in range(_ROUNDS):
        best = min(best, taken / calls)
        taken = _round(run, calls, device)
    return best


def _round(run: Callable[[], object], calls: int, device: Device) -> float:
    start = device.now()
    for _ in range(calls):
        run()
    return device.now() - start

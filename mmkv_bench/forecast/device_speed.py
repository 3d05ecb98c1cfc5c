"""Speed of devices: read-only memory bandwidth and the rate of large matrix products.

`mmkv-bench plan --measure` measures this machine's device in seconds. A cache folder has one small JSON file per
device, and files of other devices may be copied into it. Plans and comparisons with hardware limits read these files.

Bandwidth comes from the fastest of three passes that read a block far larger than any cache and write next to nothing.
(A copy writes as much as it reads, and reaches about half.) The best of several rounds counts, because disturbances
only slow a round, and nothing should exceed a limit.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.file_state import cache_dir, replace_json
from mmkv_bench.store.provenance import device_name

if TYPE_CHECKING:
    import torch

    from mmkv_bench.devices import Device

SCHEME = 2
"""Version of the file's keys and of names; files of other versions are not read."""
_BLOCK_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}  # bytes; at most an eighth of the memory
_MATRIX_WIDTH = {"cpu": 2048, "cuda": 8192}  # of the square matrices
_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
_ROUNDS, _LEAST_S = 5, 0.3
_FIRST_WIDTH, _SLOW_S = 256, 0.1
_BLOCK_COLUMNS = 4096


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured limits of one device.

    Attributes:
        kind: `cuda` or `cpu`.
        threads: number of processor threads that took part.
        bandwidth: bytes per second of a read-only pass over memory.
        rates: dtype -> operations per second of a large square product; a multiplication and an addition are two.
        memory_bytes: memory of the device; for `cpu`, of the machine.
        torch, measured: version of torch, and day of the measurement, as `2026-11-22`.
        load: load of the machine in the minute before; None if unknown (older files).
    """

    name: str
    kind: str
    threads: int
    bandwidth: float
    rates: Mapping[str, float]
    memory_bytes: int
    torch: str
    measured: str
    load: float | None = None

    @property
    def slug(self) -> str:
        """Short name of the device, for its file and for `--device`."""
        return slug_of(self.name, self.kind, self.threads)

    def __str__(self) -> str:
        rates_text = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in self.rates.items())
        threads_clause = f", {self.threads} threads" if self.kind == "cpu" else ""
        return (
            f"{self.slug}: {self.name}{threads_clause}, {self.memory_bytes / 2**30:.1f} GiB; reads "
            f"{self.bandwidth / 1e9:,.1f} GB/s; "
            f"{rates_text}; measured {self.measured} with torch {self.torch}"
        )


def slug_of(name: str, kind: str, threads: int) -> str:
    """Return the short name of a device: `nvidia-h100-80gb-hbm3`, `intel-xeon-2-threads`. Arguments: `DeviceSpeed`."""
    name_with_threads = name if kind != "cpu" else f"{name} {threads} threads"
    return re.sub(r"[^a-z0-9]+", "-", name_with_threads.lower()).strip("-")


def folder() -> Path:
    """Return the folder with the files of measured devices."""
    return cache_dir() / "devices"


def stored_speeds() -> dict[str, DeviceSpeed]:
    """Map the short name of each measured device to its speed, sorted, without unreadable files and other versions."""
    speed_files = sorted(folder().glob("*.json"))
    return {file.stem: speed for file in speed_files if (speed := _read(file)) is not None}


def stored_speed(slug: str) -> DeviceSpeed:
    """Return the stored speed of a device by its short name. Raises ConfigError: the device was not measured."""
    speeds = stored_speeds()
    if slug not in speeds:
        suggestion = nearest(slug, speeds) if speeds else "none was measured"
        raise ConfigError(
            f"--device {slug}: no measurement of it is in {folder()}; {suggestion}; "
            "run `mmkv-bench plan --measure auto` on the device, or give the numbers of its data sheet: --device-memory [GiB], "
            "--bandwidth [GB/s] and --matmul [TFLOP/s]"
        )
    return speeds[slug]


def save(speed: DeviceSpeed) -> Path:
    """Write or replace the file of a device; return its path. Raises ConfigError: the folder cannot be written."""
    speed_file = folder() / f"{speed.slug}.json"
    try:
        replace_json(speed_file, {"scheme": SCHEME, **asdict(speed)}, indent=1)
    except OSError as error:
        raise ConfigError(
            f"{speed_file} cannot be written ({error.strerror}); set MMKV_BENCH_CACHE to a writable folder"
        ) from error
    return speed_file


def _read(file: Path) -> DeviceSpeed | None:
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if values.pop("scheme") != SCHEME:
            return None
        speed = DeviceSpeed(**values)
        is_usable = speed.load is None or float(speed.load) >= 0
        is_usable &= speed.bandwidth > 0 and speed.memory_bytes > 0 and all(rate > 0 for rate in speed.rates.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return speed if is_usable else None


def speed_of_device(setting: str, again: bool = False) -> DeviceSpeed:
    """Return the speed of this machine's device, stored or measured and stored now.

    It is measured if none is stored, or if the stored one was measured under a clearly higher load of the machine.

    setting: `cpu`, `cuda`, or `auto`. again: measure in any case.

    Raises:
        ConfigError: there is no such device, or the cache folder cannot be written.
    """
    import torch

    from mmkv_bench import devices
    from mmkv_bench.models.load import device_of

    torch_device = device_of(setting)
    device_kind = devices.at(torch_device).kind
    earlier_speed = stored_speeds().get(slug_of(device_name(str(torch_device)), device_kind, torch.get_num_threads()))
    present_load = _load()
    was_disturbed = (
        earlier_speed
        and earlier_speed.load is not None
        and present_load is not None
        and earlier_speed.load > present_load + 1
    )
    if earlier_speed is not None and not again and not was_disturbed:
        return earlier_speed
    speed = measure(torch_device)
    save(speed)
    return speed


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def measure(place: torch.device, block: int | None = None, width: int | None = None) -> DeviceSpeed:
    """Measure memory bandwidth and matrix product rates of a device, with torch's present number of threads.

    Args:
        place: the device.
        block: bytes to read for the bandwidth; less is faster and less reliable.
        width: width of the square matrices; less is faster and less reliable.
    """
    import torch

    from mmkv_bench import devices

    device = devices.at(place)
    device_kind, memory_bytes, load_average = device.kind, device.total_bytes(), _load()
    block = min(block or _BLOCK_BYTES[device_kind], memory_bytes // 8)
    return DeviceSpeed(
        name=device_name(str(place)),
        kind=device_kind,
        threads=torch.get_num_threads(),
        bandwidth=_bandwidth(device, block),
        rates={
            name: _rate(device, getattr(torch, name), width or _MATRIX_WIDTH[device_kind])
            for name in _DTYPES[device_kind]
        },
        memory_bytes=memory_bytes,
        torch=torch.__version__,
        measured=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        load=load_average,
    )


def _bandwidth(device: Device, block: int) -> float:
    """Return a device's read-only memory bandwidth [bytes/s]. block: bytes to read."""
    import torch

    block_values = torch.ones(max(1, block // 4 // _BLOCK_COLUMNS), _BLOCK_COLUMNS, device=device.place)
    ones_vector = torch.ones(_BLOCK_COLUMNS, device=device.place)
    read_passes: tuple[Callable[[], object], ...] = (
        block_values.sum,
        block_values.amax,
        lambda: torch.mv(block_values, ones_vector),
    )
    return block_values.numel() * block_values.element_size() / min(_seconds(one, device) for one in read_passes)


def _rate(device: Device, dtype: torch.dtype, width: int) -> float:
    """Return the rate of large matrix products of a dtype [operations/s].

    Widths double up to `width` and end at the first slow product, because a processor without instructions for bfloat16
    needs minutes for the widest. The numbers are random, because a GPU uses less power for constants and clocks higher.
    """
    import torch

    generator, rate = torch.Generator(device.place).manual_seed(0), 0.0
    for columns in sorted({min(_FIRST_WIDTH << step, width) for step in range(width.bit_length())}):
        a, b = (torch.randn(columns, columns, generator=generator, device=device.place, dtype=dtype) for _ in range(2))
        seconds = _seconds(partial(torch.mm, a, b), device)
        rate = 2 * columns**3 / seconds
        if seconds > _SLOW_S:
            break
    return rate


def _seconds(run: Callable[[], object], device: Device) -> float:
    """Return the shortest time of one call of `run` [s], over rounds with enough calls to be timed."""
    run()
    calls = 1
    while (round_seconds := _round(run, calls, device)) < _LEAST_S / _ROUNDS:
        calls *= 2
    return min(round_seconds, *(_round(run, calls, device) for _ in range(_ROUNDS - 1))) / calls


def _round(run: Callable[[], object], calls: int, device: Device) -> float:
    start_time = device.now()
    for _ in range(calls):
        run()
    return device.now() - start_time

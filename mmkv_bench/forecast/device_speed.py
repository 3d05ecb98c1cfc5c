"""What devices were measured to do: one small JSON file each in the cache folder, read without torch.

`mmkv-bench plan --measure` measures the one of this machine (`forecast/measure_device.py`); a plan, and whoever divides a
measured time by what the device allows, read it here. Other devices' files may be copied beside it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.checksums import cache_dir
from mmkv_bench.errors import ConfigError, nearest

SCHEME = 1
"""Version of the file's keys; files of another one are not read."""


@dataclass(frozen=True)
class DeviceSpeed:
    """What one device reaches.

    Attributes:
        name: of the GPU, or of the processor; kind: `cuda` or `cpu`; threads: of the processor that took part.
        bandwidth: bytes per second that a read-only pass over memory reaches; a copy, which writes too, reaches less.
        rates: dtype -> operations per second of a large square product, two for a multiplication and an addition.
        memory_bytes: of the device, of the machine for `cpu`; torch: its version; measured: the day, as `2026-11-22`.
        load: of the machine in the minute before, None where that is not known (older files).
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
        """The name of its file, and of `--device`."""
        return slug_of(self.name, self.kind, self.threads)

    def __str__(self) -> str:
        rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in self.rates.items())
        threads = f", {self.threads} threads" if self.kind == "cpu" else ""
        return (
            f"{self.slug}: {self.name}{threads}, {self.memory_bytes / 2**30:.1f} GiB; reads {self.bandwidth / 1e9:,.1f} GB/s; "
            f"{rates}; measured {self.measured} with torch {self.torch}"
        )


def slug_of(name: str, kind: str, threads: int) -> str:
    """`nvidia-h100-80gb-hbm3`, `intel-xeon-2-threads`; arguments as of `DeviceSpeed`."""
    words = name if kind != "cpu" else f"{name} {threads} threads"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def folder() -> Path:
    """Where the files are."""
    return cache_dir() / "devices"


def stored() -> dict[str, DeviceSpeed]:
    """Slug -> what was measured, by name; files that cannot be read or are of another version are left out."""
    found = {file.stem: _read(file) for file in sorted(folder().glob("*.json"))}
    return {slug: speed for slug, speed in found.items() if speed is not None}


def named(slug: str) -> DeviceSpeed:
    """One of `stored`.

    Raises:
        ConfigError: it was not measured.
    """
    known = stored()
    if slug not in known:
        told = nearest(slug, known) if known else "none was measured; run `mmkv-bench plan --measure auto` on it"
        raise ConfigError(f"--device {slug}: no measurement of it is in {folder()}; {told}")
    return known[slug]


def save(speed: DeviceSpeed) -> Path:
    """Write it, in place of an earlier measurement of the same device.

    Raises:
        ConfigError: the folder cannot be written.
    """
    file = folder() / f"{speed.slug}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".device")
        with os.fdopen(handle, "w") as stream:
            json.dump({"scheme": SCHEME, **asdict(speed)}, stream, indent=1)
        os.replace(name, file)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror}); set MMKV_BENCH_CACHE to a writable folder"
        ) from error
    return file


def _read(file: Path) -> DeviceSpeed | None:
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if values.pop("scheme") != SCHEME:
            return None
        speed = DeviceSpeed(**values)
        usable = speed.load is None or float(speed.load) >= 0
        usable &= speed.bandwidth > 0 and speed.memory_bytes > 0 and all(rate > 0 for rate in speed.rates.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return speed if usable else None

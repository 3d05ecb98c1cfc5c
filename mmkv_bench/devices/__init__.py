"""Devices: clocks, memory counters, pinned memory and other processes of the machine that computes.

Each kind of device is a subclass of `Device`; no other file uses `torch.cuda`. Functions import torch when they need it,
so that code that only counts or names devices stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.devices.counters import Bytes, Counters
from mmkv_bench.devices.cuda import Cuda
from mmkv_bench.devices.device import Device, DeviceStream, Mark

if TYPE_CHECKING:
    import torch

__all__ = ["KINDS", "Bytes", "Counters", "Cuda", "Device", "DeviceStream", "Mark", "at", "kind_of"]

KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": Cuda}
"""Kind of device -> its class."""


def at(place: torch.device | str) -> Device:
    """Return the `Device` object of a torch device (`cpu`, `cuda`, `cuda:1`). Unknown kinds are treated like the host."""
    import torch

    place = torch.device(place)
    return KINDS.get(place.type, Device)(place)


def kind_of(setting: str) -> str:
    """Return `cuda` if a CUDA device exists and the setting (`auto`, `cpu` or `cuda`) is not `cpu`; otherwise `cpu`."""
    return "cuda" if setting != "cpu" and KINDS["cuda"].count() else "cpu"

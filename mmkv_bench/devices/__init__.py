"""Devices: what is asked of the machine besides tensors: clocks, memory counters, pinned memory, who else is on it.

One object per kind of device, `Device`; no other file asks `torch.cuda`. torch is imported where something is asked, so
that what only counts devices or names one stays light.
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
"""Kind of device -> who answers for it."""


def at(place: torch.device | str) -> Device:
    """The device object of a torch device; `cpu`, `cuda`, `cuda:1`. Kinds that nobody answers for are asked as the host is."""
    import torch

    place = torch.device(place)
    return KINDS.get(place.type, Device)(place)


def kind_of(setting: str) -> str:
    """`cpu` or `cuda` of `auto`, `cpu` or `cuda`: cuda where there is one, unless it is not wanted."""
    return "cuda" if setting != "cpu" and KINDS["cuda"].count() else "cpu"

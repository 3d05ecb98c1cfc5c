"""Measure wall-clock seconds, with the device synchronised, and peak memory of phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import psutil
import torch
from torch import nn

from mmkv_bench import devices
from mmkv_bench.devices import Bytes, Counters


class Meter:
    """Seconds per phase and peak memory of one sample.

    Seconds and peak of a phase include those of inner phases.

    Args:
        memory: counters of device bytes; None: the device's counters. If there are none, device peaks are None.

    Attributes:
        resident: largest resident set of the process at the end of a phase, in bytes.
    """

    def __init__(self, place: torch.device, memory: Counters | None = None):
        self.device = devices.at(place)
        self.memory = memory or self.device.memory
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, Bytes] = {}
        self.resident, self.aside_s = 0, 0.0
        self._open: list[str] = []
        self._peak = Bytes(0)
        if self.memory is not None:
            self.memory.restart()
        self._process = psutil.Process()

    def now(self) -> float:
        return self.device.now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._settle()
        self._open.append(name)
        start = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
            self._settle()
            self._open.remove(name)
            self.resident = max(self.resident, self._process.memory_info().rss)

    def _settle(self) -> None:
        """Update the peak of every open phase with the peak since the last call, and restart the counters."""
        if self.memory is None:
            return
        peak = self.memory.peak()
        self._peak = self._peak.larger(peak)
        for name in self._open:
            self.peaks[name] = self.peaks.get(name, peak).larger(peak)
        self.memory.restart()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the `with` block's temporary device memory from peaks, and add the block's seconds to `aside_s`."""
        self._settle()
        start = self.now()
        try:
            yield
        finally:
            self.aside_s += self.now() - start
            if self.memory is not None:
                self.memory.restart()

    def peak_device(self) -> int | None:
        """Return peak bytes allocated on the device since the meter was created; None without counters."""
        self._settle()
        return None if self.memory is None else self._peak.allocated

    def peak_resident(self) -> int | None:
        """Return the largest resident set at the end of a phase; None if the device has counters."""
        return self.resident if self.device.memory is None else None


_VISION_NAMES = ("visual", "vision_tower", "vision_model")


@contextmanager
def vision_clock(model: nn.Module, phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """In the `with` block, measure the vision tower's forward pass as the phase `vision`; no effect for a text model."""
    inner = getattr(model, "model", model)
    tower = next((getattr(inner, name) for name in _VISION_NAMES if hasattr(inner, name)), None)
    if tower is None:
        yield
        return
    with ExitStack() as running:  # a tower that fails ends its phase here

        def before(*_: object) -> None:
            running.enter_context(phase("vision"))

        def after(*_: object) -> None:
            running.pop_all().close()

        hooks = [tower.register_forward_pre_hook(before), tower.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

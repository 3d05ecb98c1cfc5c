"""Phases and memory, told apart: wall-clock seconds (synchronised on CUDA) and peak bytes (device or resident set)."""

from __future__ import annotations

import time
from contextlib import contextmanager

import psutil
import torch
from torch import nn


class Meter:
    """Seconds per phase and peak memory of one sample.

    `device` memory is CUDA's allocator peak; on other devices it is None and the process's resident set, sampled at
    the ends of phases, stands in `resident`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.resident = self._device_peak = 0
        self.aside_s = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._process = psutil.Process()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str):
        start = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
            self.resident = max(self.resident, self._process.memory_info().rss)

    @contextmanager
    def aside(self):
        """What runs inside belongs to no phase: its time goes to `aside_s`, and device memory that it takes and gives
        back is in no peak."""
        start, peak = self.now(), self.peak_device()
        try:
            yield
        finally:
            self.aside_s += self.now() - start
            if peak is not None:
                self._device_peak = peak
                torch.cuda.reset_peak_memory_stats(self.device)

    def peak_device(self) -> int | None:
        """Peak bytes of CUDA's allocator since the meter was made; None on other devices."""
        if self.device.type != "cuda":
            return None
        return max(self._device_peak, torch.cuda.max_memory_allocated(self.device))

    def peak_resident(self) -> int | None:
        """Largest resident set seen at the end of a phase; None on CUDA, where it says nothing about the cache."""
        return None if self.device.type == "cuda" else self.resident


_VISION_NAMES = ("visual", "vision_tower", "vision_model")


@contextmanager
def vision_clock(model: nn.Module, meter: Meter):
    """Adds the vision tower's forward time to the meter's `vision` phase; nothing for a text model."""
    inner = getattr(model, "model", model)
    tower = next((getattr(inner, name) for name in _VISION_NAMES if hasattr(inner, name)), None)
    if tower is None:
        yield
        return
    started: list[float] = []

    def before(*_):
        started.append(meter.now())

    def after(*_):
        meter.seconds["vision"] = meter.seconds.get("vision", 0.0) + meter.now() - started.pop()

    hooks = [tower.register_forward_pre_hook(before), tower.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

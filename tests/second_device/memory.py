"""Bytes of the second device."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv_bench.devices import Bytes, Counters
from mmkv_bench.devices.live_storages import LiveStorages


class Memory(Counters):
    """What far tensors hold. Like CUDA's allocator it keeps what is freed until it is told to give it back. `size`: of the
    device; `limit`: what may be held of it now."""

    def __init__(self, limit: int | None) -> None:
        self.live, self.size, self.limit = LiveStorages(torch.device("cpu")), limit or 2**34, limit
        self._reserved = self._most_reserved = 0

    def take(self, tensor: Tensor) -> None:
        """Count a far tensor's storage.

        Raises:
            torch.OutOfMemoryError: it does not fit beside what is held.
        """
        before = self.live.held().allocated
        self.live.add([tensor])
        held = self.live.held().allocated
        if held > before and self.limit is not None and held > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory (simulated): {held} bytes of {self.limit}")
        self._reserved = max(self._reserved, held)
        self._most_reserved = max(self._most_reserved, self._reserved)

    def held(self) -> Bytes:
        return Bytes(self.live.held().allocated, self._reserved)

    def peak(self) -> Bytes:
        return Bytes(self.live.peak().allocated, self._most_reserved)

    def alike(self, one, other) -> None: ...

    def restart(self) -> None:
        self.live.restart()
        self._most_reserved = self._reserved

    def release(self) -> None:
        self._reserved = self.live.held().allocated


PRESENT: list[Memory] = []
"""The memory of the device that is there."""

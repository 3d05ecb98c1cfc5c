"""The double of the device object, and the block within which the device is there."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from mmkv_bench import devices
from mmkv_bench.devices import Counters, Cuda
from tests.second_device.memory import PRESENT, Memory
from tests.second_device.order import UNSETTLED, TwinLane
from tests.second_device.tensors import PLACE, Far, Functions, Operations


class Event:
    """A mark: a time that is known only once somebody has waited for it."""

    def __init__(self) -> None:
        self.time, self.done = time.perf_counter(), False


class Twin(Cuda):
    """The device object of the second device.

    Attributes:
        waits: how often the host waited for the device. lanes: how often it was asked for one.
        buffers: pinned host buffers that were asked for.
        others, reasons, blocking: what a test wants to be said of other processes, of the clock and of launches.
    """

    fuses = False  # no kernels but the CPU's own
    waits = lanes = 0
    buffers: list[Tensor]
    others: tuple[int, ...] | None = ()
    reasons: tuple[str, ...] | None = ()
    blocking = False

    def __init__(self, place: torch.device):
        self.place, self.memory = place, PRESENT[-1]

    @classmethod
    def here(cls) -> torch.device:
        return PLACE

    @classmethod
    def count(cls) -> int:
        return 1

    def name(self) -> str:
        return "second device"

    def synchronise(self) -> None:
        type(self).waits += 1
        UNSETTLED.clear()

    def mark(self) -> Event:
        return Event()

    @classmethod
    def ruled_out(cls) -> bool:
        return False

    def between(self, start: Event, end: Event) -> float:
        assert end.time >= start.time, "marks in the order in which they were set"
        start.done = end.done = True
        return end.time - start.time

    def total_bytes(self) -> int:
        return self.memory.size

    def counted(self, held: Iterable[Tensor] = (), limit: int | None = None) -> AbstractContextManager[Counters]:
        assert all(isinstance(one, Far) for one in held), "what is counted lies on the device"
        return super().counted(held, limit)

    def _allow(self, share: float) -> None:
        self.memory.limit = int(share * self.total_bytes())

    def release(self) -> None:
        self.memory.release()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.empty(*shape, dtype=dtype)
        type(self).buffers.append(made)
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        made = self.host_buffer(*tensor.shape, dtype=tensor.dtype)
        return made.copy_(tensor)

    def lane(self) -> TwinLane:
        type(self).lanes += 1
        return TwinLane()

    def forked_random(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([])

    def foreign_processes(self) -> tuple[int, ...] | None:
        return self.others

    def throttled(self) -> tuple[str, ...] | None:
        return self.reasons

    def waits_for_launches(self) -> bool:
        return self.blocking


torch._C._ensureCUDADeviceGuardSet()  # where there is no CUDA device, switching to one does nothing; as for fake tensors


@contextmanager
def second_device(limit: int | None = None) -> Iterator[Twin]:
    """The device, there within the block; `limit`: bytes that it has."""
    kind = type("Twin", (Twin,), {"waits": 0, "lanes": 0, "buffers": []})
    before = devices.KINDS["cuda"]
    devices.KINDS["cuda"] = kind
    PRESENT.append(Memory(limit))
    try:
        with Functions(), Operations():
            yield kind(PLACE)
    finally:
        devices.KINDS["cuda"] = before
        PRESENT.pop()
        UNSETTLED.clear()


def there(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model on the second device; what was tied stays tied."""
    return copy.deepcopy(model).to(PLACE)

"""The device object. `Device` answers for the host: its clock needs no waiting, and its memory is counted storage by
storage where that is asked for. Other kinds override what differs."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmkv_bench.devices.counters import Counters

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class DeviceStream(AbstractContextManager[None]):
    """A second line of a device's work: work given inside its block runs beside work given outside."""

    @abstractmethod
    def settle(self) -> None:
        """Let the host wait until the work given inside is done."""

    @abstractmethod
    def join(self) -> None:
        """Let work given outside from now on wait for the work given inside."""


Mark = Any
"""A place in a device's stream of work, see `Device.mark`."""


class Device:
    """One torch device; as it stands, the host.

    Attributes:
        place: the torch device. kind: as torch calls it.
        tile: float32 elements that one block of a streaming statistic may have; the host's stays near the caches.
        adds_in_order: scattered additions to one place happen in the order of their sources, the same on every run.
        attends_by_query_head: its attention kernel takes grouped heads (`enable_gqa`) under any mask, and reads keys and
            values once per query head.
        runs_flash_attention: flash-attn has kernels for it.
        compile_mode: of `torch.compile` for a decode step.
        memory: counters that cost nothing, None where there are none.
    """

    kind: ClassVar[str] = "cpu"
    tile: ClassVar[int] = 2**20
    adds_in_order: ClassVar[bool] = True
    attends_by_query_head: ClassVar[bool] = True
    runs_flash_attention: ClassVar[bool] = False
    compile_mode: ClassVar[str | None] = None
    memory: Counters | None = None

    def __init__(self, place: torch.device):
        self.place = place

    @property
    def reads_heads_back_to_back(self) -> bool:
        """torch's `varlen_attn` has a kernel for it, in half precision."""
        return False

    @property
    def fuses(self) -> bool:
        """It runs the fused kernels of the attention statistics (Triton's)."""
        return False

    def current(self) -> AbstractContextManager[object]:
        """A block in which kernels that are started without naming a device run on this one."""
        return nullcontext()

    @classmethod
    def here(cls) -> torch.device:
        """The one that this process uses, with its number where there may be several: some of torch's calls want it."""
        import torch

        return torch.device("cpu")

    @classmethod
    def count(cls) -> int:
        """Number of devices of this kind that this process can use."""
        return 1

    @classmethod
    def ruled_out(cls) -> bool:
        """It is certain, without asking torch, that there is none."""
        return False

    def name(self) -> str:
        """Its maker's name of it."""
        return str(self.place)

    # ------------------------------------------------------------------ time
    def synchronise(self) -> None:
        """Wait until all work given to the device is done; the host's is done when an operation returns."""

    def now(self) -> float:
        """Seconds of a clock without jumps, when all work given to the device is done."""
        self.synchronise()
        return time.perf_counter()

    def mark(self) -> Mark:
        """A place behind all work given so far. It is not waited for, so a step that is marked is not slowed."""
        return time.perf_counter()

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds of the device from one mark to a later one; waits for the later one."""
        return end - start

    # ------------------------------------------------------------------ memory
    def total_bytes(self) -> int:
        """All memory of the device, whoever uses it."""
        import psutil

        return psutil.virtual_memory().total

    def counted(self, held: Iterable[Tensor] = (), limit: int | None = None) -> AbstractContextManager[Counters]:
        """Counters within the block. Where `memory` is None, counting slows the block: time it in another pass.

        Args:
            held: tensors made before the block that are to be counted (weights, inputs).
            limit: bytes beyond which an allocation raises `torch.OutOfMemoryError`.
        """
        from mmkv_bench.devices.live_storages import LiveStorages

        return LiveStorages(self.place, held, limit)

    def release(self) -> None:
        """Give back memory that is reserved and not used, after tensors are gone; the host's allocator does so by itself."""

    def forget_graphs(self) -> None:
        """Drop graphs of compiled steps whose storages are gone; on the host a compiled step is a program."""

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor in host memory that the device can copy from while it works (pinned, where it matters)."""
        import torch

        return torch.empty(*shape, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor in memory as `host_buffer` gives; itself on the host."""
        return tensor

    def lane(self) -> DeviceStream | None:
        """A second line of work, behind everything given so far; None where copies do not run beside computing."""
        return None

    # ------------------------------------------------------------------ random numbers
    def forked_random(self) -> AbstractContextManager[None]:
        """A block in which torch's global generators of host and device may be seeded; afterwards they are as before."""
        import torch

        return torch.random.fork_rng([])

    # ------------------------------------------------------------------ trust
    def foreign_processes(self) -> tuple[int, ...] | None:
        """Process ids of others that compute on the device; None where that is not known."""
        return None

    def throttled(self) -> tuple[str, ...] | None:
        """Reasons for which its clock is held down now, empty when it is not; None where that is not known."""
        return None

    def waits_for_launches(self) -> bool:
        """CUDA_LAUNCH_BLOCKING is set: every kernel is waited for, so times of steps are not those of a served model."""
        return False

    def threads(self) -> int:
        """Threads of torch's operations on the host: no more than cores that this process may use."""
        import torch

        return min(torch.get_num_threads(), cores())


def cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: by its affinity, and by its control group's quota where one is set."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        allowed = os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
        return allowed if limit == "max" else max(1, min(allowed, int(limit) // int(period)))
    except (OSError, ValueError):
        return allowed

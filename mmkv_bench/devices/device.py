"""The base class of devices, `Device`. It is the host, whose clock needs no waiting; other kinds override what differs."""

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

_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


class DeviceStream(AbstractContextManager[None]):
    """A second stream of work on a device. Work submitted inside the `with` block runs concurrently with other work."""

    @abstractmethod
    def settle(self) -> None:
        """Block the host until the work that was submitted inside the block is done."""

    @abstractmethod
    def join(self) -> None:
        """Make the main stream's later work wait for the work that was submitted inside the block."""


Mark = Any
"""A point in a device's stream of work; see `Device.mark`."""


class Device:
    """One torch device. The base class is the host.

    Attributes:
        place: the torch device.
        kind: torch's name of the kind of device.
        tile: most float32 elements of one block of a streaming statistic; small enough for the host's caches.
        adds_in_order: `index_add_` adds the sources of one element in their order, so that sums are equal on every run.
        attends_by_query_head: the attention kernel takes grouped heads (`enable_gqa`) under any mask, and reads keys and
            values once per query head.
        runs_flash_attention: flash-attn has kernels for the device.
        compile_mode: mode of `torch.compile` for a decode step.
        memory: counters that do not slow the device; None if the device has none.
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
        """Tell whether torch's `varlen_attn` has a kernel for the device, in half precision."""
        return False

    @property
    def fuses(self) -> bool:
        """Tell whether the device runs the fused kernels of the attention statistics (Triton's)."""
        return False

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager under which kernels that name no device run on this device."""
        return nullcontext()

    @classmethod
    def here(cls) -> torch.device:
        """Return the torch device that this process uses, with its index if there may be several, as some functions need it."""
        import torch

        return torch.device("cpu")

    @classmethod
    def count(cls) -> int:
        """Count the devices of this kind that this process can use."""
        return 1

    @classmethod
    def ruled_out(cls) -> bool:
        """Tell whether there is certainly no device of this kind. Does not import torch."""
        return False

    def name(self) -> str:
        """Return the manufacturer's name of the device."""
        return str(self.place)

    # ------------------------------------------------------------------ time
    def synchronise(self) -> None:
        """Wait until all work given to the device is done. On the host nothing has to be waited for."""

    def now(self) -> float:
        """Return the time of a monotonic clock [s] once all work given to the device is done."""
        self.synchronise()
        return time.perf_counter()

    def mark(self) -> Mark:
        """Return a time mark behind all work submitted so far, for `between`. Marking does not wait for the work."""
        return time.perf_counter()

    def between(self, start: Mark, end: Mark) -> float:
        """Return the seconds from one mark of the device to a later one. Waits for the later mark."""
        return end - start

    # ------------------------------------------------------------------ memory
    def total_bytes(self) -> int:
        """Return the bytes of all memory of the device, used or not."""
        import psutil

        return psutil.virtual_memory().total

    def counted(self, held: Iterable[Tensor] = (), limit: int | None = None) -> AbstractContextManager[Counters]:
        """Return a context manager that yields memory counters of its block.

        If `memory` is None, counting slows the block, so the block must be timed in another pass.

        Args:
            held: tensors made before the block that count too (weights, inputs).
            limit: bytes beyond which an allocation raises `torch.OutOfMemoryError`.
        """
        from mmkv_bench.devices.live_storages import LiveStorages

        return LiveStorages(self.place, held, limit)

    def release(self) -> None:
        """Return reserved but unused memory to the device. On the host this does nothing."""

    def forget_graphs(self) -> None:
        """Drop the recorded graphs of compiled steps whose storages were freed. On the host there are none."""

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor in host memory; the device can copy to and from it while it computes (pinned on CUDA)."""
        import torch

        return torch.empty(*shape, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in a `host_buffer`; on the host, the tensor itself."""
        return tensor

    def lane(self) -> DeviceStream | None:
        """Return a second stream for concurrent copies; None if the device cannot copy and compute at once.

        Work in the stream starts after all work submitted so far.
        """
        return None

    # ------------------------------------------------------------------ random numbers
    def forked_random(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the state of torch's global generators, of host and device, at its end."""
        import torch

        return torch.random.fork_rng([])

    # ------------------------------------------------------------------ trust
    def foreign_processes(self) -> tuple[int, ...] | None:
        """Return the ids of other processes that compute on the device; None if unknown."""
        return None

    def throttled(self) -> tuple[str, ...] | None:
        """Return the reasons for which the device's clock is reduced now; empty if it is not, None if unknown."""
        return None

    def waits_for_launches(self) -> bool:
        """Tell whether CUDA_LAUNCH_BLOCKING is set. The host then waits for every kernel, which lengthens step times."""
        return False

    def threads(self) -> int:
        """Return the number of threads of torch's host operations, at most the cores that this process may use."""
        import torch

        return min(torch.get_num_threads(), cores())


def cores(quota: Path = _QUOTA_FILE) -> int:
    """Return the number of cores that this process may use, by its affinity and by its control group's quota.

    quota: the control group's file with the quota.
    """
    try:
        allowed_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        allowed_cores = os.cpu_count() or 1
    try:
        quota_us, period_us = quota.read_text().split()
        return allowed_cores if quota_us == "max" else max(1, min(allowed_cores, int(quota_us) // int(period_us)))
    except (OSError, ValueError):
        return allowed_cores

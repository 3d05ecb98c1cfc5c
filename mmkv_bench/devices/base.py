"""What a device is asked, whichever it is; and what is the same of all, since the host asks it of itself."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Bytes(NamedTuple):
    """`allocated` bytes of live storages; `reserved` ones that an allocator holds for them, None where it does not say."""

    allocated: int
    reserved: int | None = None

    def larger(self, other: Bytes) -> Bytes:
        """The larger of both, number by number."""
        sides = [one.reserved for one in (self, other) if one.reserved is not None]
        return Bytes(max(self.allocated, other.allocated), max(sides) if sides else None)


class Counters(ABC):
    """Memory that is held now, and the most that was held since `restart`."""

    @abstractmethod
    def held(self) -> Bytes: ...

    @abstractmethod
    def peak(self) -> Bytes: ...

    @abstractmethod
    def alike(self, one: Tensor, other: Tensor) -> None:
        """Count another tensor where one is counted: of a pass that stands for a larger one."""

    @abstractmethod
    def restart(self) -> None:
        """The peak begins again with what is held now."""


class Lane(AbstractContextManager[None]):
    """A second line of a device's work: what is given inside its block runs beside what is given outside."""

    @abstractmethod
    def settle(self) -> None:
        """The host waits until what was given inside is done."""

    @abstractmethod
    def join(self) -> None:
        """What is given outside from now on waits for what was given inside."""


Mark = Any
"""A place in a device's stream of work, see `Device.mark`."""


class Device(ABC):
    """One torch device.

    Attributes:
        place: the torch device. kind: as torch calls it.
        tile: float32 elements that one block of a streaming statistic may have.
        adds_in_order: scattered additions to one place happen in the order of their sources, the same on every run.
        attends_by_query_head: its attention kernel takes grouped heads (`enable_gqa`) under any mask, and reads keys and
            values once per query head.
        runs_flash_attention: flash-attn has kernels for it.
        compile_mode: of `torch.compile` for a decode step.
    """

    kind: ClassVar[str]
    tile: ClassVar[int]
    adds_in_order: ClassVar[bool]
    attends_by_query_head: ClassVar[bool]
    runs_flash_attention: ClassVar[bool]
    compile_mode: ClassVar[str | None]

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
        """Within it kernels that are started without naming a device run on this one."""
        return nullcontext()

    @classmethod
    @abstractmethod
    def here(cls) -> torch.device:
        """The one that this process uses, with its number where there may be several: some of torch's calls want it."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """How many of this kind this process can use."""

    @classmethod
    def ruled_out(cls) -> bool:
        """Whether it is certain, without asking torch, that there is none."""
        return False

    @abstractmethod
    def name(self) -> str:
        """As its maker calls it."""

    # ------------------------------------------------------------------ time
    @abstractmethod
    def synchronise(self) -> None:
        """Wait until all work given to the device is done."""

    def now(self) -> float:
        """Seconds of a clock without jumps, when all work given to the device is done."""
        self.synchronise()
        return time.perf_counter()

    @abstractmethod
    def mark(self) -> Mark:
        """A place behind all work given so far; does not wait for it, so a step that is marked is not slowed."""

    @abstractmethod
    def between(self, start: Mark, end: Mark) -> float:
        """Seconds of the device from one mark to a later one; waits for the later one."""

    # ------------------------------------------------------------------ memory
    memory: Counters | None = None
    """Counters that cost nothing, None where there are none."""

    @abstractmethod
    def total_bytes(self) -> int:
        """All memory that it has, whoever uses it."""

    @abstractmethod
    def counted(self, held: Iterable[Tensor] = (), limit: int | None = None) -> AbstractContextManager[Counters]:
        """Counters within the block; `held`: tensors made before it that are to be counted (weights, inputs). Beyond `limit`
        bytes whatever is allocated raises `torch.OutOfMemoryError`.

        Where `memory` is None, counting slows what runs inside: time it in another pass.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back memory that is reserved and not used, after tensors are gone."""

    @abstractmethod
    def forget_graphs(self) -> None:
        """Let go of graphs of compiled steps, whose storages are gone."""

    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor in host memory that the device can copy from while it works (pinned, where it matters)."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor in memory as `host_buffer` gives; itself on the host."""

    @abstractmethod
    def lane(self) -> Lane | None:
        """A second line of work, behind everything given so far; None where copies do not run beside computing."""

    # ------------------------------------------------------------------ random numbers
    @abstractmethod
    def forked_random(self) -> AbstractContextManager[None]:
        """Within it torch's global generators of host and device may be seeded; afterwards they are as before."""

    # ------------------------------------------------------------------ trust
    def foreign_processes(self) -> tuple[int, ...] | None:
        """Process ids of others that compute on the device; None where that cannot be told."""
        return None

    def throttled(self) -> tuple[str, ...] | None:
        """Why its clock is held down now, empty when it is not; None where that cannot be told."""
        return None

    def waits_for_launches(self) -> bool:
        """CUDA_LAUNCH_BLOCKING is set: every kernel is waited for, so times of steps are not those of a served model."""
        return False

    def threads(self) -> int:
        """Threads that torch's operations on the host really have: no more than cores that this process may use."""
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

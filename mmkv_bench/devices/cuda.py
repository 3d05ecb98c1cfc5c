"""CUDA devices. Kernels run asynchronously, so clocks wait for them or record events in the stream."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from mmkv_bench.devices.counters import Bytes, Counters
from mmkv_bench.devices.device import Device, DeviceStream

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_DRIVER_FILES = ("nvidia", "nvhost", "nvgpu", "nvmap", "kfd", "dxg")
"""Prefixes of the files in `/dev` through which torch reaches a device that it calls cuda."""


# Bits of `clocks_throttle_reasons.active` in NVIDIA's nvml.h. An idle device's low clock is no throttling, and a clock set by
# the site (application clocks) is equal in every pass.
_NO_THROTTLE = 0x1 | 0x2
_THROTTLE_BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}


def _cuda() -> Any:
    """Return `torch.cuda`, imported at the first call."""
    import torch

    return torch.cuda


@cache
def _has_triton() -> bool:
    """Tell whether Triton is installed together with the C compiler that builds its launchers, found as Triton finds it."""
    return find_spec("triton") is not None and bool(
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    )


class AllocatorCounters(Counters):
    """Memory counters of torch's caching allocator: all memory of this process on one device."""

    def __init__(self, place: torch.device):
        self.place = place

    def held(self) -> Bytes:
        return Bytes(_cuda().memory_allocated(self.place), _cuda().memory_reserved(self.place))

    def peak(self) -> Bytes:
        return Bytes(_cuda().max_memory_allocated(self.place), _cuda().max_memory_reserved(self.place))

    def restart(self) -> None:
        _cuda().reset_peak_memory_stats(self.place)

    def alike(self, one: Tensor, other: Tensor) -> None:
        """Do nothing: an allocator counts only real tensors."""


class SideStream(DeviceStream):
    """A second CUDA stream of a device, shared by all callers of `Cuda.lane`.

    Its work starts after all earlier work of the main stream, so memory freed in a `with` block is overwritten only after
    the main stream has read it.
    """

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, place: torch.device):
        if place not in self._streams:
            self._streams[place] = _cuda().Stream(place)
        self.place, self.stream = place, self._streams[place]
        self.stream.wait_stream(_cuda().current_stream(place))
        self._inside = _cuda().stream(self.stream)

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._inside.__exit__(*exception)

    def settle(self) -> None:
        self.stream.synchronize()

    def join(self) -> None:
        _cuda().current_stream(self.place).wait_stream(self.stream)


class Cuda(Device):
    kind = "cuda"
    tile = 2**24  # fewer, larger kernels
    adds_in_order = False
    attends_by_query_head = False
    runs_flash_attention = True
    compile_mode = "reduce-overhead"  # CUDA graphs
    memory: Counters

    def __init__(self, place: torch.device):
        super().__init__(place)
        self.memory = AllocatorCounters(place)

    @property
    def reads_heads_back_to_back(self) -> bool:
        import torch

        if not torch.cuda.is_available():
            return True  # a plan for a device of another machine
        from_ampere_on = torch.cuda.get_device_capability(self.place) >= (8, 0)
        return from_ampere_on and torch.backends.cuda.is_flash_attention_available()

    @property
    def fuses(self) -> bool:
        return _has_triton()

    def current(self) -> AbstractContextManager[object]:
        return _cuda().device(self.place)

    @classmethod
    def here(cls) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def count(cls) -> int:
        return _cuda().device_count() if _cuda().is_available() else 0

    @classmethod
    def ruled_out(cls) -> bool:
        """Tell whether there is certainly no CUDA device: Linux has no device file of a driver (NVIDIA, Jetson, AMD or WSL)."""
        return sys.platform == "linux" and not any(name.startswith(_DRIVER_FILES) for name in os.listdir("/dev"))

    def name(self) -> str:
        return _cuda().get_device_name(self.place)

    def synchronise(self) -> None:
        _cuda().synchronize(self.place)

    def mark(self) -> torch.cuda.Event:
        event = _cuda().Event(enable_timing=True)
        event.record(_cuda().current_stream(self.place))
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def total_bytes(self) -> int:
        return _cuda().get_device_properties(self.place).total_memory

    @contextmanager
    def counted(self, held: Iterable[Tensor] = (), limit: int | None = None) -> Iterator[Counters]:
        """Count memory inside the block, see `Device.counted`. Reserved memory counts against the limit.

        `held` is ignored, because the allocator counts these tensors already.
        """
        if limit is None:
            yield self.memory
            return
        self._allow(limit / self.total_bytes())
        try:
            yield self.memory
        finally:
            self._allow(1.0)

    def _allow(self, share: float) -> None:
        """Limit this process to a share of the device's memory."""
        self.release()  # reserved but unused memory would count
        numbered_device = self.here() if self.place.index is None else self.place
        _cuda().set_per_process_memory_fraction(min(share, 1.0), numbered_device)

    def release(self) -> None:
        _cuda().empty_cache()

    def forget_graphs(self) -> None:
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.host_buffer(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def lane(self) -> DeviceStream:
        return SideStream(self.place)

    def forked_random(self) -> AbstractContextManager[None]:
        import torch

        return torch.random.fork_rng([self.place])

    def foreign_processes(self) -> tuple[int, ...] | None:
        return foreign(nvidia_smi("compute-apps=pid", self._identity()), os.getpid())

    def throttled(self) -> tuple[str, ...] | None:
        return reasons(nvidia_smi("gpu=clocks_throttle_reasons.active", self._identity()))

    def _identity(self) -> str:
        """Return the device's name for nvidia-smi, which does not depend on CUDA_VISIBLE_DEVICES."""
        return f"GPU-{_cuda().get_device_properties(self.place).uuid}"

    def waits_for_launches(self) -> bool:
        return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def nvidia_smi(query: str, identity: str) -> list[str] | None:
    """Return the output lines of `nvidia-smi --query-<query>` for the device `identity`; None if the command fails."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", f"--id={identity}"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in completed.stdout.splitlines() if line.strip()]


def foreign(lines: list[str] | None, process: int) -> tuple[int, ...] | None:
    """Return the ids of other processes that compute on a device; None if they are unknown.

    This process has a context on the device, since it asked CUDA for its name. If its id is missing from the list, a container
    hides or renumbers processes, so nothing is known.

    lines: output of `nvidia_smi`, one process per line. process: id of this process.
    """
    try:
        process_ids = {int(line) for line in lines or []}
    except ValueError:
        return None
    return tuple(sorted(process_ids - {process})) if process in process_ids else None


def reasons(lines: list[str] | None) -> tuple[str, ...] | None:
    """Return the names of the reasons for which a GPU's clock is throttled; None if they cannot be read.

    lines: output of `nvidia_smi`, a bit mask such as `0x0000000000000004`.
    """
    try:
        reason_bits = int(lines[0], 16) if lines else None
    except ValueError:  # [N/A]
        return None
    if reason_bits is None:
        return None
    known_bits = sum(_THROTTLE_BITS) | _NO_THROTTLE
    unknown_reason = (f"unknown reason {reason_bits & ~known_bits:#x}",) if reason_bits & ~known_bits else ()
    return tuple(name for bit, name in _THROTTLE_BITS.items() if reason_bits & bit) + unknown_reason

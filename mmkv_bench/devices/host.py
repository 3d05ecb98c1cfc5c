"""The host itself: its clock needs no waiting, its memory is counted storage by storage when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mmkv_bench.devices.base import Counters, Device

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Host(Device):
    kind = "cpu"
    tile = 2**20  # stays near the caches
    adds_in_order = True
    attends_by_query_head = True
    runs_flash_attention = False
    compile_mode = None

    @classmethod
    def here(cls) -> torch.device:
        import torch

        return torch.device("cpu")

    @classmethod
    def count(cls) -> int:
        return 1

    def name(self) -> str:
        return str(self.place)

    def synchronise(self) -> None:
        """Its operations are done when they return."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start

    def total_bytes(self) -> int:
        import psutil

        return psutil.virtual_memory().total

    def counted(self, held: Iterable[Tensor] = (), limit: int | None = None) -> AbstractContextManager[Counters]:
        from mmkv_bench.devices.tally import LiveStorages

        return LiveStorages(self.place, held, limit)

    def release(self) -> None:
        """Its allocator gives back by itself."""

    def forget_graphs(self) -> None:
        """There are none: a compiled step is a program."""

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(*shape, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def lane(self) -> None:
        return None

    def forked_random(self) -> AbstractContextManager[None]:
        import torch

        return torch.random.fork_rng([])

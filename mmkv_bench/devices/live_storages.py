"""A counter of live storages that watches torch's operations, for devices whose allocator does not count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmkv_bench.devices.counters import Bytes, Counters


class LiveStorages(TorchDispatchMode, Counters):
    """A context manager that counts every tensor storage that an operation makes, until the storage is freed.

    A storage counts once with all of its bytes, however many tensors view it. Memory that a kernel takes and gives back
    inside one operation is not counted.

    Args:
        place: only storages on this kind of device count.
        held: tensors made before the block that count too; other earlier tensors do not.
        limit: bytes beyond which an operation fails as it does when memory runs out; None: no limit.

    Raises:
        torch.OutOfMemoryError: within the block, by the operation whose result exceeds the limit.
    """

    def __init__(self, place: torch.device, held: Iterable[Tensor] = (), limit: int | None = None):
        super().__init__()
        self.place, self.limit = place, limit
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._earlier = list(held)
        self._now = self._peak = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self.add(self._earlier)
        self._earlier = []
        return self

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        operation_result = function(*args, **(kwargs or {}))
        self.add(tree_leaves(operation_result))
        if self.limit is not None and self._now > self.limit:
            raise torch.OutOfMemoryError(f"{self._now} bytes are in use, more than the limit of {self.limit}")
        return operation_result

    def storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor; None if it is not on the counted kind of device."""
        return tensor.untyped_storage() if tensor.device.type == self.place.type else None

    def add(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors among `values` from now on, until they are freed."""
        for value in values:
            storage = self.storage(value) if isinstance(value, Tensor) else None
            if storage is None or id(storage) in self._live:
                continue
            storage_bytes = storage.nbytes()
            self._live[id(storage)] = weakref.ref(storage, partial(self._freed, id(storage), storage_bytes))
            self._now += storage_bytes
        self._peak = max(self._peak, self._now)

    def alike(self, one: Tensor, other: Tensor) -> None:
        if id(self.storage(one)) in self._live:
            self.add([other])

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._live[key]
        self._now -= size

    def held(self) -> Bytes:
        return Bytes(self._now)

    def peak(self) -> Bytes:
        return Bytes(self._peak)

    def restart(self) -> None:
        self._peak = self._now

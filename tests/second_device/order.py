"""Work is done at once, but must not be looked at before a real device would have done it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmkv_bench.devices import DeviceStream


class Race(RuntimeError):
    """What a real device would not notice: work that another line has not done yet is read or written."""


def each_tensor(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Arguments or results of an operation with their tensors changed; torch's own way knows more shapes and takes long."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([each_tensor(change, one) for one in value])
    return {name: each_tensor(change, one) for name, one in value.items()} if type(value) is dict else value


def tensors_of(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    each_tensor(found.append, list(values))
    return found


LANES: list[TwinLane] = []
"""Those inside whose blocks we are."""
UNSETTLED: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
"""Host memory -> what a copy that nobody has waited for does with it."""


class TwinLane(DeviceStream):
    """The device's second line."""

    joined = False

    def __enter__(self) -> None:
        self.joined = False
        LANES.append(self)

    def __exit__(self, *_: object) -> None:
        LANES.remove(self)

    def settle(self) -> None:
        UNSETTLED.clear()

    def join(self) -> None:
        self.joined = True


def check_order(function: Any, args: tuple, kwargs: dict, distant: list[Tensor]) -> None:
    """Raises where work on a lane, or a copy that does not wait, is taken for done."""
    for one in distant:
        if (lane := getattr(one, "lane", None)) is not None and not lane.joined and lane not in LANES:
            raise Race(f"{function}: {tuple(one.shape)} comes from a lane that nothing has joined")
    if not UNSETTLED:
        return
    for argument, value in zip(function._schema.arguments, args, strict=False):
        _check_settled(function, value, argument.alias_info is not None and argument.alias_info.is_write)
    for name, value in kwargs.items():
        _check_settled(function, value, name == "out")


def _check_settled(function: Any, value: Any, written: bool) -> None:
    for one in tensors_of(value):
        use = None if hasattr(one, "elem") else UNSETTLED.get(one.untyped_storage())
        if use is not None and (written or use.startswith("written")):
            raise Race(f"{function}: host memory that is {use}, and nobody has waited")

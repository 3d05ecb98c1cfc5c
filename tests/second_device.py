"""A second device, simulated: tensors that say `cuda:0`, compute on the CPU and refuse to be mixed with CPU tensors.

Nothing of torch is replaced. A far tensor is a subclass that wraps a CPU tensor; one mode answers for functions that make or
move tensors, before torch looks for a driver, another for operations, which are computed on what is wrapped. What CUDA
allows beside its tensors is allowed: single values in elementwise operations, and indices of the host. While the device
is there, `devices.KINDS["cuda"]` is its double: it counts bytes like an allocator, can be given a size, and its clock, events and
pinned memory can be looked at.

    with second_device() as device:
        model = there(zoo.build("qwen2_5_vl"))          # a copy; the model stays as it is
        ... run something on `model`, `device.memory.peak()` ...

`torch.compile` does nothing under modes, so compiled decoding is tested on the CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mmkv_bench import devices
from mmkv_bench.devices import Bytes, Counters, Cuda, Lane
from mmkv_bench.devices.tally import LiveStorages

PLACE = torch.device("cuda", 0)
HOST = torch.device("cpu")
_aten = torch.ops.aten

_INDEXED = {"aten::index.Tensor", "aten::_unsafe_index.Tensor"}
_INDEX_WRITTEN = {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
_LAZY = {_aten._conj.default: _aten.conj_physical.default, _aten._neg_view.default: _aten.neg.default}
"""Views that only note what is to be done: below the dispatcher nobody would do it."""

_HOST_ONLY = {"numpy", "__array__", "__dlpack__"}


class Race(RuntimeError):
    """What a real device would not notice: work that another line has not done yet is read or written."""


class MixedDevices(RuntimeError):
    """What torch raises on a machine with a GPU, in its words."""


class Far(Tensor):
    """A tensor of the second device; `elem` has its values, on the CPU."""

    elem: Tensor
    lane: _Lane | None

    @staticmethod
    def __new__(cls, elem: Tensor) -> Far:
        assert _present, "tensors of the second device are made while it is there"
        _present[-1].take(elem)
        with DisableTorchFunctionSubclass():
            outside = torch.empty_strided(elem.size(), elem.stride(), dtype=elem.dtype, device="meta")
            made = Tensor._make_subclass(
                cls, outside, elem.requires_grad, dispatch_device=True, device_for_backend_keys=PLACE
            )
        made.elem = elem.detach()
        made.lane = _lanes[-1] if _lanes else None
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, Tensor], *_: Any) -> Far:
        return Far(inside["elem"])

    @property
    def device(self) -> torch.device:
        return PLACE

    @property
    def is_cuda(self) -> bool:
        return True

    def __repr__(self, **_: Any) -> str:
        return f"Far({self.elem!r})"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _called(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _computed(function, args, kwargs or {})


def near(value: Any) -> Any:
    """What a far tensor wraps; anything else as it is."""
    return value.elem if isinstance(value, Far) else value


def _each(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Arguments or results of an operation with their tensors changed; torch's own way knows more shapes and takes long."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([_each(change, one) for one in value])
    return {name: _each(change, one) for name, one in value.items()} if type(value) is dict else value


def _tensors(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each(found.append, list(values))
    return found


def far(value: Any) -> Any:
    """Copies of the tensors on the second device, in the same structure (dataclasses too)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: far(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return tree_map(
        lambda one: Far(one.clone()) if isinstance(one, Tensor) and not isinstance(one, Far) else one, value
    )


# ---------------------------------------------------------------------- functions: making and moving
def _is_far(place: Any) -> bool:
    return place is not None and torch.device(place if not isinstance(place, int) else PLACE).type == "cuda"


def _called(function: Any, args: tuple, kwargs: dict) -> Any:
    """A function of torch's Python side."""
    name = getattr(function, "__name__", "")
    me = args[0] if args else None
    if isinstance(me, Tensor):
        if name in ("to", "cuda", "cpu"):
            return _moved(name, me, args[1:], kwargs)
        if isinstance(me, Far):
            if name in _HOST_ONLY:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
            if name in ("tolist", "untyped_storage", "data_ptr"):
                return getattr(me.elem, name)()
            if name in ("__getitem__", "__setitem__"):
                return _indexed(name, me, *args[1:])
            if (name.startswith("new_") or name.endswith("_like")) and kwargs.get("device") is None:
                kwargs = dict(kwargs, device=PLACE)
    if kwargs.get("device") is not None and name != "scaled_dot_product_attention":
        return _made(function, args, kwargs)
    with DisableTorchFunctionSubclass():
        if name == "scaled_dot_product_attention":
            return _attended(function, args, kwargs)
        return function(*args, **kwargs)


def _made(function: Any, args: tuple, kwargs: dict) -> Any:
    """A function that makes tensors on a device that it is told."""
    if not _is_far(kwargs["device"]):
        with DisableTorchFunctionSubclass():
            return function(*_each(near, args), **_each(near, kwargs))
    inside = dict(_each(near, kwargs), device=HOST)
    with DisableTorchFunctionSubclass():
        return _each(Far, function(*_each(near, args), **inside))


def _asked(args: tuple, kwargs: dict) -> tuple[Any, dict]:
    """(device, the other arguments by name) of `Tensor.to`."""
    named, names = dict(kwargs), ["dtype", "non_blocking", "copy"]
    if args and isinstance(args[0], Tensor):
        named |= {"device": args[0].device, "dtype": args[0].dtype}
        args, names = args[1:], names[1:]
    elif args and not isinstance(args[0], torch.dtype):
        named["device"], args = args[0], args[1:]
    named |= dict(zip(names, args, strict=False))
    place = named.pop("device", None)
    return place, {name: value for name, value in named.items() if value is not None}


def _moved(name: str, me: Tensor, args: tuple, kwargs: dict) -> Tensor:
    """`to`, `cuda` and `cpu` of one tensor."""
    place, other = _asked(args, kwargs) if name == "to" else ({"cpu": HOST, "cuda": PLACE}[name], {})
    here = isinstance(me, Far)
    there = here if place is None else _is_far(place)
    _check_order(_aten._to_copy.default, (me,), {}, [me] if here else [])
    if there and not here and other.get("non_blocking"):
        _unsettled[me.untyped_storage()] = "read by the device"
    with DisableTorchFunctionSubclass():
        made = me.elem.to(**other) if here else me.to(**other)
        if there == here:
            return me if made is near(me) else Far(made) if there else made
        made = made.clone() if made is near(me) else made  # another device's memory is never the same
        return Far(made) if there else made


def _indexed(name: str, me: Far, index: Any, *value: Any) -> Tensor | None:
    """`me[index]`, `me[index] = value`: indices may lie on the host, values only where they are copied into a slice."""
    chosen = any(isinstance(one, Tensor | list) for one in (index if isinstance(index, tuple) else (index,)))
    if chosen and value and isinstance(value[0], Tensor) and not isinstance(value[0], Far) and value[0].ndim:
        raise _mixed(name, value[0])
    _check_order(_aten.index.Tensor, (me,), {}, _tensors(me, index, value))
    with DisableTorchFunctionSubclass():
        made = getattr(me.elem, name)(_each(near, index), *map(near, value))
    return None if made is None else Far(made)


def _attended(function: Any, args: tuple, kwargs: dict) -> Tensor:
    """One operation here, so that the CPU's own kernel computes it as it does for CPU tensors."""
    tensors = _tensors(args, kwargs)
    distant = [one for one in tensors if isinstance(one, Far)]
    if distant and len(distant) < len(tensors):
        raise _mixed("scaled_dot_product_attention", next(one for one in tensors if not isinstance(one, Far)))
    _check_order(_aten._to_copy.default, (), {}, distant)
    made = function(*_each(near, args), **_each(near, kwargs))
    return Far(made) if distant else made


# ---------------------------------------------------------------------- operations
def _mixed(name: str, tensor: Tensor) -> MixedDevices:
    return MixedDevices(
        f"{name}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
        f"(on the CPU: {tuple(tensor.shape)})"
    )


def _check(function: Any, name: str, args: tuple, tensors: list[Tensor]) -> None:
    """Raises what CUDA would raise of CPU tensors beside its own."""
    other = [one for one in tensors if not isinstance(one, Far)]
    if not other or len(other) == len(tensors):
        return
    if name in _INDEXED | _INDEX_WRITTEN:
        written = args[2] if name in _INDEX_WRITTEN else args[0]
        other = [one for one in (args[0], written) if not isinstance(one, Far) and one is not None]
        other = [one for one in other if one is args[0] or one.ndim]
    elif torch.Tag.pointwise in function.tags or name.startswith("aten::masked_fill"):
        other = [one for one in other if one.ndim or (one is args[0] and name.split(".", maxsplit=1)[0].endswith("_"))]
    if other:
        raise _mixed(name, other[0])


def _computed(function: Any, args: tuple, kwargs: dict) -> Any:
    """An operation, on what its tensors wrap."""
    if function is torch.ops.prim.device.default:
        return PLACE
    tensors = _tensors(args, kwargs)
    distant = [one for one in tensors if isinstance(one, Far)]
    name, place = function.name().removesuffix(".default"), kwargs.get("device")
    if name.split(".")[0] not in ("aten::_to_copy", "aten::copy_"):
        _check(function, name, args, tensors)
    _check_order(function, args, kwargs, distant)
    if place is not None:
        kwargs = dict(kwargs, device=HOST)
    function = _LAZY.get(function, function)
    made = function(*_each(near, args), **_each(near, kwargs))
    if not (bool(distant) if place is None else _is_far(place)) or name == "aten::_local_scalar_dense":
        return made
    if name == "aten::copy_":
        if args[2:] == (True,) and not isinstance(args[0], Far):
            _unsettled[args[0].untyped_storage()] = "written by the device"
        return args[0]
    given = {id(one.elem): one for one in distant}  # what is written in place is returned as what it was

    return _each(lambda one: given[id(one)] if id(one) in given else Far(one), made)


# ---------------------------------------------------------------------- the order of work
_lanes: list[_Lane] = []
"""Those inside whose blocks we are."""
_unsettled: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
"""Host memory -> what a copy that nobody has waited for does with it."""


class _Lane(Lane):
    """Work is done at once, but must not be looked at before it would have been done."""

    joined = False

    def __enter__(self) -> None:
        self.joined = False
        _lanes.append(self)

    def __exit__(self, *_: object) -> None:
        _lanes.remove(self)

    def settle(self) -> None:
        _unsettled.clear()

    def join(self) -> None:
        self.joined = True


def _check_order(function: Any, args: tuple, kwargs: dict, distant: list[Tensor]) -> None:
    """Raises where work on a lane, or a copy that does not wait, is taken for done."""
    for one in distant:
        if isinstance(one, Far) and one.lane is not None and not one.lane.joined and one.lane not in _lanes:
            raise Race(f"{function}: {tuple(one.shape)} comes from a lane that nothing has joined")
    if not _unsettled:
        return
    for argument, value in zip(function._schema.arguments, args, strict=False):
        _check_settled(function, value, argument.alias_info is not None and argument.alias_info.is_write)
    for name, value in kwargs.items():
        _check_settled(function, value, name == "out")


def _check_settled(function: Any, value: Any, written: bool) -> None:
    for one in _tensors(value):
        use = None if isinstance(one, Far) else _unsettled.get(one.untyped_storage())
        if use is not None and (written or use.startswith("written")):
            raise Race(f"{function}: host memory that is {use}, and nobody has waited")


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _called(function, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _computed(function, args, kwargs or {})


# ---------------------------------------------------------------------- the double of the device object
class _Memory(Counters):
    """What far tensors hold. Like CUDA's allocator it keeps what is freed until it is told to give it back."""

    def __init__(self, limit: int | None) -> None:
        self.live, self.limit = LiveStorages(HOST), limit
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

    def restart(self) -> None:
        self.live.restart()
        self._most_reserved = self._reserved

    def release(self) -> None:
        self._reserved = self.live.held().allocated


_present: list[_Memory] = []
"""The memory of the device that is there."""


class _Event:
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

    waits = lanes = 0
    buffers: list[Tensor]
    others: tuple[int, ...] | None = ()
    reasons: tuple[str, ...] | None = ()
    blocking = False

    def __init__(self, place: torch.device):
        self.place, self.memory = place, _present[-1]

    @classmethod
    def count(cls) -> int:
        return 1

    def name(self) -> str:
        return "second device"

    def synchronise(self) -> None:
        type(self).waits += 1
        _unsettled.clear()

    def mark(self) -> _Event:
        return _Event()

    def between(self, start: _Event, end: _Event) -> float:
        assert end.time >= start.time, "marks in the order in which they were set"
        start.done = end.done = True
        return end.time - start.time

    def total_bytes(self) -> int:
        return self.memory.limit or 2**34

    def counted(self, held: Iterable[Tensor] = ()) -> AbstractContextManager[Counters]:
        assert all(isinstance(one, Far) for one in held), "what is counted lies on the device"
        return nullcontext(self.memory)

    def release(self) -> None:
        self.memory.release()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.empty(*shape, dtype=dtype)
        type(self).buffers.append(made)
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        made = self.host_buffer(*tensor.shape, dtype=tensor.dtype)
        return made.copy_(tensor)

    def lane(self) -> _Lane:
        type(self).lanes += 1
        return _Lane()

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
    _present.append(_Memory(limit))
    try:
        with _Functions(), _Operations():
            yield kind(PLACE)
    finally:
        devices.KINDS["cuda"] = before
        _present.pop()
        _unsettled.clear()


def there(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model on the second device; what was tied stays tied."""
    return copy.deepcopy(model).to(PLACE)

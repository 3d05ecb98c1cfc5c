"""Tensors that say `cuda:0`: how they are made, moved, computed with and refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.second_device.memory import PRESENT
from tests.second_device.order import LANES, UNSETTLED, TwinLane, check_order, each_tensor, tensors_of

PLACE = torch.device("cuda", 0)
HOST = torch.device("cpu")
_aten = torch.ops.aten

_INDEXED = {"aten::index.Tensor", "aten::_unsafe_index.Tensor"}
_INDEX_WRITTEN = {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
_LAZY = {_aten._conj.default: _aten.conj_physical.default, _aten._neg_view.default: _aten.neg.default}
"""Views that only note what is to be done: below the dispatcher nobody would do it."""

_HOST_ONLY = {"numpy", "__array__", "__dlpack__"}


class MixedDevices(RuntimeError):
    """What torch raises on a machine with a GPU, in its words."""


class Far(Tensor):
    """A tensor of the second device; `elem` has its values, on the CPU."""

    elem: Tensor
    lane: TwinLane | None

    @staticmethod
    def __new__(cls, elem: Tensor) -> Far:
        assert PRESENT, "tensors of the second device are made while it is there"
        PRESENT[-1].take(elem)
        with DisableTorchFunctionSubclass():
            outside = torch.empty_strided(elem.size(), elem.stride(), dtype=elem.dtype, device="meta")
            made = Tensor._make_subclass(
                cls, outside, elem.requires_grad, dispatch_device=True, device_for_backend_keys=PLACE
            )
        made.elem = elem.detach()
        made.lane = LANES[-1] if LANES else None
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
            return function(*each_tensor(near, args), **each_tensor(near, kwargs))
    inside = dict(each_tensor(near, kwargs), device=HOST)
    with DisableTorchFunctionSubclass():
        return each_tensor(Far, function(*each_tensor(near, args), **inside))


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
    check_order(_aten._to_copy.default, (me,), {}, [me] if here else [])
    if there and not here and other.get("non_blocking"):
        UNSETTLED[me.untyped_storage()] = "read by the device"
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
    check_order(_aten.index.Tensor, (me,), {}, tensors_of(me, index, value))
    with DisableTorchFunctionSubclass():
        made = getattr(me.elem, name)(each_tensor(near, index), *map(near, value))
    return None if made is None else Far(made)


def _attended(function: Any, args: tuple, kwargs: dict) -> Tensor:
    """One operation here, so that the CPU's own kernel computes it as it does for CPU tensors."""
    tensors = tensors_of(args, kwargs)
    distant = [one for one in tensors if isinstance(one, Far)]
    if distant and len(distant) < len(tensors):
        raise _mixed("scaled_dot_product_attention", next(one for one in tensors if not isinstance(one, Far)))
    check_order(_aten._to_copy.default, (), {}, distant)
    made = function(*each_tensor(near, args), **each_tensor(near, kwargs))
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
    tensors = tensors_of(args, kwargs)
    distant = [one for one in tensors if isinstance(one, Far)]
    name, place = function.name().removesuffix(".default"), kwargs.get("device")
    if name.split(".")[0] not in ("aten::_to_copy", "aten::copy_"):
        _check(function, name, args, tensors)
    check_order(function, args, kwargs, distant)
    if place is not None:
        kwargs = dict(kwargs, device=HOST)
    function = _LAZY.get(function, function)
    made = function(*each_tensor(near, args), **each_tensor(near, kwargs))
    if not (bool(distant) if place is None else _is_far(place)) or name == "aten::_local_scalar_dense":
        return made
    if name == "aten::copy_":
        if args[2:] == (True,) and not isinstance(args[0], Far):
            UNSETTLED[args[0].untyped_storage()] = "written by the device"
        return args[0]
    given = {id(one.elem): one for one in distant}  # what is written in place is returned as what it was

    return each_tensor(lambda one: given[id(one)] if id(one) in given else Far(one), made)


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _called(function, args, kwargs or {})


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _computed(function, args, kwargs or {})

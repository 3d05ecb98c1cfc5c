"""A dispatch mode that gives torch's fake tensors values: computed values if possible, otherwise random values.

`dry_run.py` explains why counting memory needs values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten
CARRIED = 2**26
"""Largest number of elements of a tensor that gets computed values."""
INVENTED = 2**22
"""Largest number of elements of a result that gets made-up values."""
_SHAPED = {
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.empty_like.default,
    _aten.new_empty_strided.default,
}
"""Operations that read the shape of their input but no values."""
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_like.default,
}
"""Operations that return uninitialised values; zeros in this mode."""


class FakeValuesMode(TorchDispatchMode):
    """Mode that gives small fake tensors values. Enter it inside of the fake mode and of a memory counter.

    Attributes:
        carries: whether results get values; False while a model is built, because weights have no values.
        invents: whether small results get made-up values if values of the arguments are unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.carries, self.invents = True, False
        self._known = WeakTensorKeyDictionary()
        self._random = torch.Generator().manual_seed(0)

    # ------------------------------------------------------------------ numbers
    def hold(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor on a device with the values of a real tensor."""
        real_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        with _disable_current_modes():
            self._known[real_tensor] = tensor.detach().clone()
        return real_tensor

    def _numbers(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor  # made outside, a module's constant
        if getattr(tensor.untyped_storage(), "overwritten", False):
            return None
        values = self._known.get(tensor)
        return values if values is not None else tensor.constant

    def _read(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values on the host; made-up values if they are unknown."""
        numbers = self._numbers(tensor)
        if numbers is None:
            numbers = self._invented(tensor)
            if not getattr(tensor.untyped_storage(), "overwritten", False):
                self._known[tensor] = numbers
        return numbers

    def _invented(self, like: Tensor) -> Tensor:
        """Return made-up values: random in [0, 1) for floats, 0 for integers (a valid index), False for masks."""
        shape = tuple(like.shape)
        if not (like.dtype.is_floating_point or like.dtype.is_complex):
            return torch.zeros(shape, dtype=like.dtype)
        return torch.rand(shape, generator=self._random).to(like.dtype)

    # ------------------------------------------------------------------ operations
    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is _aten._local_scalar_dense.default:
            with _disable_current_modes():
                return self._read(args[0]).item()
        if not self.carries or function is torch.ops.prim.device.default:
            return function(*args, **kwargs)
        if _shape_follows(function, args):
            return self._counted(function, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if function in _SHAPED:
            tensors = []
        result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if not outputs or max(output.numel() for output in outputs) > CARRIED:
            return result
        with _disable_current_modes():
            if all(self._numbers(tensor) is not None for tensor in tensors):
                self._carry(result, self._computed(function, args, kwargs))
            elif function._schema.is_mutable:
                self._mutated(function, args, kwargs, tensors)
            elif self.invents and not _is_view(function):
                for output in outputs:
                    if output.numel() <= INVENTED:
                        self._known[output] = self._invented(output)
        return result

    def _computed(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation on the values of its arguments, on the host, and return the result."""

        def number(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return self._read(leaf) if isinstance(leaf, Tensor) else leaf

        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if function in _SHAPED:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        result = function(*tree_map(number, args), **tree_map(number, kwargs))
        return result.zero_() if function in _EMPTY else result

    def _carry(self, made: Any, numbers: Any) -> None:
        for output, value in zip(tree_leaves(made), tree_leaves(numbers), strict=True):
            if isinstance(output, FakeTensor) and isinstance(value, Tensor):
                self._known[output] = value

    def _mutated(self, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        """Run an operation that writes to its first argument on known values, with made-up values for small unknown inputs.

        If values may not be made up or an unknown input is large, the values of the first argument become unknown.
        """
        target = args[0]
        if self._numbers(target) is None:
            return
        if self.invents and all(self._numbers(one) is not None or one.numel() <= INVENTED for one in tensors):
            self._computed(function, args, kwargs)
        else:
            target.untyped_storage().overwritten = True

    def _counted(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation whose result's shape depends on the values of its arguments."""
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if function is _aten.index.Tensor and self._numbers(args[0]) is None:
            return self._picked(*args)
        with _disable_current_modes():
            numbers = self._computed(function, args, kwargs)
        return tree_map(lambda value: self.hold(value, device) if isinstance(value, Tensor) else value, numbers)

    def _picked(self, source: Tensor, index: list[Tensor | None]) -> Tensor:
        """Index a tensor without known values; the values of masks among the indices give the shape of the result."""
        mask_indices = [one for one in index if one is not None and one.dtype == torch.bool]
        if len(index) == len(mask_indices) == 1:
            with _disable_current_modes():
                count = int(self._read(mask_indices[0]).sum())
            return source.new_empty(count, *source.shape[mask_indices[0].ndim :])
        index_tensors = [
            self._counted(_aten.nonzero.default, (one,), {})[:, 0]
            if one is not None and one.dtype == torch.bool
            else one
            for one in index
        ]
        return _aten.index.Tensor(source, index_tensors)


def _shape_follows(function: Any, args: tuple) -> bool:
    """Tell whether the shape of an operation's result depends on the values of its arguments."""
    if function is _aten.index.Tensor:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return torch.Tag.dynamic_output_shape in function.tags


def _is_view(function: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.arguments)

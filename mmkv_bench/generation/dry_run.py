"""Operations without numbers: what would be allocated is counted, nothing is computed, and no device is needed.

Tensors are torch's fake ones, which have a shape, a dtype and a device that this machine need not have. Selection reads
numbers, however: how many entries a head keeps, whether a prompt has text. So small tensors carry numbers as well
(`MadeUp`): true ones where all that they come from has numbers (token types, budgets, indices), made-up ones where a method
first derives something small from what has none (scores of tokens). What is read is then consistent in itself, and of the
right size; which entries are kept means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
CARRIED = 2**26
"""Elements of the largest tensor that carries numbers."""
INVENTED = 2**22
"""Elements of the largest tensor whose numbers are made up."""
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
"""Operations that read the shape of their input and none of its numbers."""


class MadeUp(TorchDispatchMode):
    """Numbers of small fake tensors; must be entered inside of the fake mode and of a counter.

    Attributes:
        invents: whether small results of tensors without numbers get made-up ones now; where it is False only true
            numbers are carried.
    """

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.fake, self.invents = fake, False
        self._random = torch.Generator().manual_seed(0)

    # ------------------------------------------------------------------ numbers
    def hold(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A real tensor as a fake one on a device, with its numbers."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        with _disable_current_modes():
            made.numbers = tensor.detach().clone()
        return made

    def _numbers(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor  # made outside, a module's constant
        found = getattr(tensor, "numbers", None)
        return found if found is not None else tensor.constant

    def _read(self, tensor: Tensor) -> Tensor:
        """Its numbers, made up where it has none."""
        found = self._numbers(tensor)
        if found is None:
            found = tensor.numbers = self._invented(tensor)
        return found

    def _invented(self, like: Tensor) -> Tensor:
        """Between 0 and 1 where it is real, 0 where it is whole: an index into anything, and no mask's member."""
        shape = tuple(like.shape)
        if not (like.dtype.is_floating_point or like.dtype.is_complex):
            return torch.zeros(shape, dtype=like.dtype)
        return torch.rand(shape, generator=self._random).to(like.dtype)

    # ------------------------------------------------------------------ operations
    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default:
            return function(*args, **kwargs)
        if function is _aten._local_scalar_dense.default:
            with _disable_current_modes():
                return self._read(args[0]).item()
        if _shape_follows(function, args):
            return self._counted(function, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if function in _SHAPED:
            tensors = []
        try:
            made = function(*args, **kwargs)
        except Exception:
            print('DBG', function, [getattr(a,'shape',a) for a in args])
            raise
        outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, FakeTensor)]
        if not outputs or max(output.numel() for output in outputs) > CARRIED:
            return made
        with _disable_current_modes():
            if all(self._numbers(tensor) is not None for tensor in tensors):
                self._carry(made, self._computed(function, args, kwargs))
            elif function._schema.is_mutable:
                self._mutated(function, args, kwargs, tensors)
            elif self.invents and not _is_view(function):
                for output in outputs:
                    if output.numel() <= INVENTED:
                        output.numbers = self._invented(output)
        return made

    def _computed(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """The operation on the numbers, on the host."""

        def number(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return self._read(leaf) if isinstance(leaf, Tensor) else leaf

        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if function in _SHAPED:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        return function(*tree_map(number, args), **tree_map(number, kwargs))

    def _carry(self, made: Any, numbers: Any) -> None:
        for output, value in zip(tree_leaves(made), tree_leaves(numbers), strict=True):
            if isinstance(output, FakeTensor) and isinstance(value, Tensor):
                output.numbers = value

    def _mutated(self, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        """Numbers of what is written to, from something without numbers: made up where they are few, else left as they are."""
        target = args[0]
        if not isinstance(target, Tensor) or self._numbers(target) is None:
            return
        if all(self._numbers(tensor) is not None or tensor.numel() <= INVENTED for tensor in tensors):
            self._computed(function, args, kwargs)

    def _counted(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """An operation whose result is as long as numbers say."""
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if function is _aten.index.Tensor and self._numbers(args[0]) is None:
            return self._picked(*args)
        with _disable_current_modes():
            numbers = self._computed(function, args, kwargs)
        return tree_map(lambda value: self.hold(value, device) if isinstance(value, Tensor) else value, numbers)

    def _picked(self, source: Tensor, index: list[Tensor | None]) -> Tensor:
        """`source[mask]` of a source without numbers."""
        with _disable_current_modes():
            masks = [
                None if one is None else self._read(one) if one.dtype == torch.bool else None for one in index
            ]
            whole = list(index)
            if len(index) == 1 and masks[0] is not None:
                count, dims = int(masks[0].sum()), masks[0].ndim
            else:
                count, dims = -1, 0
        if count < 0:
            rows = [
                self._counted(_aten.nonzero.default, (one,), {})[:, 0]
                if one is not None and one.dtype == torch.bool
                else one
                for one in whole
            ]
            return _aten.index.Tensor(source, rows)
        return source.new_empty(count, *source.shape[dims:])


def _shape_follows(function: Any, args: tuple) -> bool:
    """Whether the shape of the result depends on numbers."""
    if function is _aten.index.Tensor:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return torch.Tag.dynamic_output_shape in function.tags


def _is_view(function: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.arguments)


class FlashAttention(TorchFunctionMode):
    """Attention by a fused kernel: its output and one number per query row, no scores. Fake tensors alone would be given the
    plain products, T x T numbers that no device of today holds."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        query, value = args[0] if args else kwargs["query"], args[2] if len(args) > 2 else kwargs["value"]
        batch, heads, rows, _ = query.shape
        sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        output = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        del sums
        return output


@contextmanager
def without_numbers(counter: TorchDispatchMode | None = None) -> Iterator[MadeUp]:
    """Within it tensors are fake, and those of the counter's device are counted by it."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made_up = MadeUp(fake)
    with fake:
        if counter is None:
            with FlashAttention(), made_up:
                yield made_up
        else:
            with counter, FlashAttention(), made_up:
                yield made_up

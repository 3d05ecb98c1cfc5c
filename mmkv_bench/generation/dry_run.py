"""Operations without numbers: what would be allocated is counted, nothing is computed, and no device is needed.

Tensors are torch's fake ones, which have a shape, a dtype and a device that this machine need not have. Selection reads
numbers, however: how many entries a head keeps, whether a prompt has text. So small tensors carry numbers as well
(`MadeUp`): true ones where all that they come from has numbers (token types, budgets, indices), made-up ones where a method
first derives something small from what has none (scores of tokens). What is read is then consistent in itself, and of the
right size; which entries are kept means nothing.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from mmkv_bench.compression.numerics.tiles import ends_only
from mmkv_bench.devices.tally import LiveStorages
from mmkv_bench.generation.phases import DECODE, REDUCE, Peaks, run
from mmkv_bench.models.families import family_of, text_model

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.devices import Counters

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
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_like.default,
}
"""Operations whose numbers are whatever was there; zeros here."""


class MadeUp(TorchDispatchMode):
    """Numbers of small fake tensors; must be entered inside of the fake mode and of a counter.

    Attributes:
        invents: whether small results of tensors without numbers get made-up ones now; where it is False only true
            numbers are carried.
        carries: whether results get numbers at all; not while a model is built, whose weights have none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.carries, self.invents = True, False
        self._known = WeakTensorKeyDictionary()
        self._random = torch.Generator().manual_seed(0)

    # ------------------------------------------------------------------ numbers
    def hold(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A real tensor as a fake one on a device, with its numbers."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        with _disable_current_modes():
            self._known[made] = tensor.detach().clone()
        return made

    def _numbers(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor  # made outside, a module's constant
        if getattr(tensor.untyped_storage(), "overwritten", False):
            return None
        found = self._known.get(tensor)
        return found if found is not None else tensor.constant

    def _read(self, tensor: Tensor) -> Tensor:
        """Its numbers, made up where it has none."""
        found = self._numbers(tensor)
        if found is None:
            found = self._invented(tensor)
            if not getattr(tensor.untyped_storage(), "overwritten", False):
                self._known[tensor] = found
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
        made = function(*args, **kwargs)
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
                        self._known[output] = self._invented(output)
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
        found = function(*tree_map(number, args), **tree_map(number, kwargs))
        return found.zero_() if function in _EMPTY else found

    def _carry(self, made: Any, numbers: Any) -> None:
        for output, value in zip(tree_leaves(made), tree_leaves(numbers), strict=True):
            if isinstance(output, FakeTensor) and isinstance(value, Tensor):
                self._known[output] = value

    def _mutated(self, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        """Something without numbers is written to a tensor that has some: they are made up, or nobody knows them any more."""
        target = args[0]
        if self._numbers(target) is None:
            return
        if self.invents and all(self._numbers(one) is not None or one.numel() <= INVENTED for one in tensors):
            self._computed(function, args, kwargs)
        else:
            target.untyped_storage().overwritten = True

    def _counted(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """An operation whose result is as long as numbers say."""
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if function is _aten.index.Tensor and self._numbers(args[0]) is None:
            return self._picked(*args)
        with _disable_current_modes():
            numbers = self._computed(function, args, kwargs)
        return tree_map(lambda value: self.hold(value, device) if isinstance(value, Tensor) else value, numbers)

    def _picked(self, source: Tensor, index: list[Tensor | None]) -> Tensor:
        """`source[mask]` of a source without numbers: as many rows as the mask has members."""
        masks = [one for one in index if one is not None and one.dtype == torch.bool]
        if len(index) == len(masks) == 1:
            with _disable_current_modes():
                count = int(self._read(masks[0]).sum())
            return source.new_empty(count, *source.shape[masks[0].ndim :])
        places = [
            self._counted(_aten.nonzero.default, (one,), {})[:, 0]
            if one is not None and one.dtype == torch.bool
            else one
            for one in index
        ]
        return _aten.index.Tensor(source, places)


def _shape_follows(function: Any, args: tuple) -> bool:
    """Whether the shape of the result depends on numbers."""
    if function is _aten.index.Tensor:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return torch.Tag.dynamic_output_shape in function.tags


def _is_view(function: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.arguments)


class Kernels(TorchFunctionMode):
    """What torch does on a device that is there, where fake tensors alone would do something else.

    Attention is a fused kernel: its output and one number per query row, no scores; fake tensors would be given the plain
    products, T x T numbers that no device of today holds. A tensor of Python numbers is made on the host and moved.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if function is torch.tensor and kwargs.get("device") is not None:
            plain = tree_map(lambda one: one.tolist() if isinstance(one, Tensor) else one, args)
            return torch.tensor(*plain, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return function(*args, **kwargs)

    @staticmethod
    def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        batch, heads, rows = query.shape[:3]
        sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        output = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        del sums
        return output


class DryPeaks(Peaks):
    """Peaks of a dry run. Numbers are made up where they are read: by selection, reduction and policies, not by scores, which
    are sums over blocks of which only some are run."""

    def __init__(self, counters: Counters, made_up: MadeUp):
        super().__init__(counters)
        self.made_up = made_up

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `Peaks`."""
        before, self.made_up.invents = self.made_up.invents, name in (REDUCE, DECODE)
        try:
            with super().phase(name):
                yield
        finally:
            self.made_up.invents = before


@contextmanager
def without_numbers(counter: LiveStorages) -> Iterator[MadeUp]:
    """Within it tensors are fake, and those of the counter's kind of device are counted by it."""
    made_up = MadeUp()
    with FakeTensorMode(allow_non_fake_inputs=True), counter, Kernels(), made_up, ends_only():
        yield made_up


class DryModel:
    """A model without weights, of which prompts are counted; within `without_numbers`.

    Args:
        config: of transformers; dtype, attention: as of a run; counter: counts its storages from the first on.
    """

    def __init__(self, config: Any, dtype: torch.dtype, attention: str, counter: LiveStorages, made_up: MadeUp):
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.counter, self.made_up, self.family = counter, made_up, family_of(config)
        classes = AutoModelForImageTextToText if self.family.multimodal else AutoModelForCausalLM
        made_up.carries = False
        with counter.place:
            self.model = classes.from_config(copy.deepcopy(config), dtype=dtype).eval()
        made_up.carries = True
        alone = self.model.config is text_model(self.model).config
        self.model.set_attn_implementation(attention if alone else {"text_config": attention})

    def peaks(
        self,
        compressor: Compressor,
        budget: Budget | None,
        types: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
        steps: int = 2,
        reserve: int = 32,
    ) -> dict[str, int]:
        """Phase -> the most bytes held, of one prompt.

        Args:
            types: int `[1, T]`, 0 text, 1 image, 2 video, with numbers; inputs: what a processor made of the prompt. Without
                them visual tokens are taken for text, and no vision tower runs. steps, reserve: see `phases.run`.
        """
        place = self.counter.place
        given = self._text(types) if inputs is None else inputs
        held = {name: self._held(value) for name, value in given.items()}
        self.counter.restart()
        peaks = DryPeaks(self.counter, self.made_up)
        kinds = self.made_up.hold(types, place)
        run(self.model, held, compressor, budget, peaks, types=kinds, steps=steps, reserve=reserve)
        gc.collect()
        return {name: peak.allocated for name, peak in peaks.of.items()}

    def _text(self, types: Tensor) -> dict[str, Tensor]:
        with _disable_current_modes():
            inputs = {"input_ids": torch.zeros_like(types)}
            if getattr(text_model(self.model).rotary_emb, "mrope_section", None) is not None:
                inputs["position_ids"] = torch.arange(types.shape[1]).expand(3, 1, -1)
        return inputs

    def _held(self, value: Tensor) -> Tensor:
        """Ids and grids with their numbers, pixels without."""
        if not value.is_floating_point():
            return self.made_up.hold(value, self.counter.place)
        self.made_up.carries = False
        pixels = torch.empty(value.shape, dtype=value.dtype, device=self.counter.place)
        self.made_up.carries = True
        return pixels


@contextmanager
def dry_model(config: Any, dtype: str, attention: str, kind: str) -> Iterator[DryModel]:
    """A model whose storages on a kind of device (`cuda`, `cpu`) are counted; other arguments as of `DryModel`."""
    counter = LiveStorages(torch.device(kind))
    with without_numbers(counter) as made_up:
        yield DryModel(config, getattr(torch, dtype), attention, counter, made_up)


def prompt_types(tokens: int, visual: int) -> Tensor:
    """int64 `[1, tokens]`, with numbers: a few words, an image of `visual` tokens, a question."""
    with _disable_current_modes():
        types = torch.zeros(1, tokens, dtype=torch.int64)
        first = min(tokens // 10, tokens - visual)
        types[0, first : first + visual] = 1
    return types

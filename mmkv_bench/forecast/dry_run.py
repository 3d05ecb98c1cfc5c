"""Dry runs: the real code on tensors without values. Allocations are counted, nothing is computed, and no device is
needed.

The tensors are torch's fake tensors, which have a shape, a dtype and a device that this machine need not have. But
selection reads values: how many entries a head keeps, whether a prompt has text. So small tensors carry values too
(`FakeValuesMode`). Values computed from token types, budgets and indices are right. Values computed from tensors
without values, such as scores of tokens, are made up. Then shapes and counts are right, but not which entries are kept.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mmkv_bench.compression.numerics.tiles import ends_only
from mmkv_bench.devices.live_storages import LiveStorages
from mmkv_bench.families.facts import model_facts, text_model
from mmkv_bench.generation import stream_pass
from mmkv_bench.generation.fake_values import FakeValuesMode
from mmkv_bench.generation.one_pass import DECODE, REDUCE, SELECT, Peaks, run
from mmkv_bench.models.load import set_attention

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.devices import Counters


class Kernels(TorchFunctionMode):
    """Replaces calls that behave differently on fake tensors than on a real device.

    Fused attention allocates what a device's kernel allocates, the output and one number per query row. Torch would
    allocate T x T scores for fake tensors. `torch.tensor(numbers, device=...)` makes the tensor on the host and moves
    it.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if getattr(function, "__name__", "").startswith("_varlen_attn"):
            return self._back_to_back(*args, **kwargs)
        if function is torch.tensor and kwargs.get("device") is not None:
            args_without_tensors = tree_map(lambda one: one.tolist() if isinstance(one, Tensor) else one, args)
            return torch.tensor(*args_without_tensors, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return function(*args, **kwargs)

    @staticmethod
    def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        batch, heads, query_rows = query.shape[:3]
        row_sums = query.new_empty(batch, heads, query_rows, dtype=torch.float32)
        output = query.new_empty(batch, query_rows, heads, value.shape[-1]).transpose(1, 2)
        del row_sums
        return output

    @staticmethod
    def _back_to_back(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Stand in for the attention kernel of sequences stored back to back. Return output, row sums and random state."""
        query_rows, heads = query.shape[:2]
        row_sums = query.new_empty(heads, query_rows, dtype=torch.float32)
        return query.new_empty(query_rows, heads, value.shape[-1]), row_sums, query.new_empty(2, dtype=torch.uint64)


def grouped_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Stand in for transformers' grouped expert products, which sort rows by values that fake tensors lack.

    Allocate the same tensors, and return an output of the same shape.

    Args:
        module: the experts' module.
        hidden: `[tokens, E]`.
        index: `[tokens, k]`, the experts of each token.
        weights: `[tokens, k]`, the weights of the experts' outputs.
    """

    def products(rows: Tensor, name: str) -> Tensor:
        expert_weight = getattr(module, name)[0]
        output = rows @ (expert_weight if module.is_transposed else expert_weight.T)
        return output + getattr(module, f"{name}_bias")[index.flatten()] if module.has_bias else output

    rows = hidden.repeat_interleave(index.shape[-1], 0)
    rows = products(module._apply_gate(products(rows, "gate_up_proj")), "down_proj")
    return (rows * weights.reshape(-1, 1)).view(*index.shape, -1).sum(1).to(hidden.dtype)


class DryPeaks(Peaks):
    """Memory peaks by phase of a dry run.

    Selection, reduction and decoding read values, so their tensors get made-up ones. Scoring reads none. Of its blocks
    of queries only the first and the last two are run: the others differ only in the number of keys (`tiles.py`).
    """

    def __init__(self, counters: Counters, made_up: FakeValuesMode):
        super().__init__(counters)
        self.made_up = made_up

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the memory peak of the phase `name` inside the block, with made-up values if the phase reads values."""
        earlier_setting, self.made_up.invents = self.made_up.invents, name in (SELECT, REDUCE, DECODE)
        try:
            with super().phase(name):
                yield
        finally:
            self.made_up.invents = earlier_setting


@contextmanager
def without_numbers(counter: LiveStorages) -> Iterator[FakeValuesMode]:
    """Make new tensors fake inside the block. Yield the mode that makes up values on request.

    counter: counts the storages on its kind of device.
    """
    made_up = FakeValuesMode()
    with FakeTensorMode(allow_non_fake_inputs=True), counter, Kernels(), made_up, ends_only():
        yield made_up


class DryModel:
    """A model without weights, on fake tensors, that counts the memory of prompts. Use it within `without_numbers`.

    Args:
        config: transformers config.
        dtype, attention: as for a run.
        counter: counts all storages of the model.
        made_up: the mode that makes up tensor values.
    """

    def __init__(self, config: Any, dtype: torch.dtype, attention: str, counter: LiveStorages, made_up: FakeValuesMode):
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.integrations.moe import ExpertsInterface

        self.counter, self.made_up, self.family = counter, made_up, model_facts(config)
        auto_class = AutoModelForImageTextToText if self.family.multimodal else AutoModelForCausalLM
        made_up.carries = False
        with counter.place:
            self.model = auto_class.from_config(copy.deepcopy(config), dtype=dtype).eval()
        made_up.carries = True
        set_attention(self.model, attention)
        if getattr(self.model.config, "num_local_experts", None):
            ExpertsInterface.register("mmkv_grouped", grouped_experts)
            self.model.config._experts_implementation = "mmkv_grouped"

    def peaks(
        self,
        compressor: Compressor,
        budget: Budget | None,
        types: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
        reserve: int = 32,
        chunk: int = 0,
    ) -> dict[str, int]:
        """Run one prompt with a method. Return phase (prefill, decode, ...) -> peak memory [bytes].

        Args:
            compressor, budget: the method and its budget.
            types: token types, int `[1, T]`, 0 text, 1 image, 2 video; a real tensor.
            inputs: a processor's output for the prompt. Without it, visual tokens are treated as text, and no vision
                tower runs.
            reserve: see `one_pass.run`.
            chunk: tokens per chunk if the prompt is read as a stream of text; 0 for no stream.
        """
        device = self.counter.place
        prompt_inputs = self._text(types) if inputs is None or chunk else inputs
        inputs_on_device = {name: self.made_up.hold(value, device) for name, value in prompt_inputs.items()}
        self.counter.restart()
        phase_peaks = DryPeaks(self.counter, self.made_up)
        token_types = self.made_up.hold(self._text(types)["input_ids"] if chunk else types, device)
        if chunk:
            stream_pass.run(
                self.model, inputs_on_device["input_ids"], token_types, compressor, budget, phase_peaks, chunk, reserve
            )
        else:
            run(self.model, inputs_on_device, compressor, budget, phase_peaks, types=token_types, reserve=reserve)
        gc.collect()
        return {name: peak.allocated for name, peak in phase_peaks.of.items()}

    def _text(self, types: Tensor) -> dict[str, Tensor]:
        with _disable_current_modes():
            inputs = {"input_ids": torch.zeros_like(types)}
            if getattr(text_model(self.model).rotary_emb, "mrope_section", None) is not None:
                inputs["position_ids"] = torch.arange(types.shape[1]).expand(3, 1, -1)
        return inputs


@contextmanager
def dry_model(config: Any, dtype: str, attention: str, kind: str) -> Iterator[DryModel]:
    """Yield a `DryModel` whose memory is counted. kind: device (`cuda`, `cpu`). Other arguments: see `DryModel`."""
    counter = LiveStorages(torch.device(kind))
    with without_numbers(counter) as made_up:
        yield DryModel(config, getattr(torch, dtype), attention, counter, made_up)


def prompt_types(tokens: int, visual: int) -> Tensor:
    """Return token types, real int64 `[1, tokens]`, of a few words, an image of `visual` tokens and a question."""
    with _disable_current_modes():
        types = torch.zeros(1, tokens, dtype=torch.int64)
        image_start = min(tokens // 10, tokens - visual)
        types[0, image_start : image_start + visual] = 1
    return types

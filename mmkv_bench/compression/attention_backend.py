"""The attention functions registered with transformers: transformers' kernels, with a mask over a compressed cache's slots.

`transformers` calls `mmkv_sdpa`, `mmkv_eager` or `mmkv_fa2` for the text layers of an attached model only; the vision
tower keeps its implementation. A mask function is registered under each name too. Where it is missing, transformers
builds no mask, and padding would be attended to.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv_bench import devices
from mmkv_bench.compression import flash, varlen_layer
from mmkv_bench.compression.cache import CompressedLayer, Kernel
from mmkv_bench.errors import UnsupportedError

SUPPORTED_BASES = ("sdpa", "eager", flash.FLASH)
GROUPED_FROM = 1024  # slots; fewer keys stay in a processor's cache however often they are read


class Attention(Protocol):
    """Attributes of a model's attention module that this package reads."""

    layer_idx: int
    scaling: float
    head_dim: int
    q_proj: nn.Linear


class Serving(Protocol):
    """Interface of the session that serves an attention module."""

    def after_attention(self, module: Attention, query: Tensor, layer: CompressedLayer) -> None: ...


# Arguments that a session's hooks pass to the attention function: the cache layer of the call, and whether the module
# stores nothing and only reads that layer.
LAYER, READS = "compressed_layer", "reads_another"

# Which session serves an attention module.
SESSIONS: WeakKeyDictionary[Attention, Serving] = WeakKeyDictionary()


def sinks_of(module: object) -> Tensor | None:
    """Return the learned sinks of an attention module, float32 `[Hq]`; None if it has none."""
    sinks: Tensor | None = getattr(module, "sinks", None)
    return None if sinks is None else sinks.detach().float()


def _eager(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return softmax(Q K^T * scaling + mask) V and the attention weights, with a float32 softmax.

    This package needs its own function, because transformers registers none for eager attention.
    s_aux: `[Hq]`, learned sinks (gpt-oss): one more column of scores, without a value. As in that model, the softmax then
    runs in the dtype of the scores, after the row's maximum is subtracted.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if mask is not None and mask.shape[1] not in (1, query.shape[1]):
        mask = mask.repeat_interleave(groups, 1)
    if mask is not None and mask.dtype == torch.bool:  # a fixed layer's
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    elif mask is not None:
        weights = weights + mask
    if s_aux is None:
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    else:
        column = s_aux.view(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, column], -1)
        weights = (weights - weights.amax(-1, keepdim=True)).softmax(-1)[..., :-1].to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _sdpa(
    module: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call transformers' `sdpa`, or torch's function without copying keys and values for each query head of a KV head.

    mask: `[B|1, Hq|Hkv|1, n, slots]`. For a single query, the query heads of a KV head become rows of one query, so keys and
    values are read once per KV head. This needs one mask per KV head, or one for all heads (as a fixed layer has). Without a
    mask it is done only for long caches on a CPU, whose kernel would read keys and values once per query head.
    """
    heads, new_tokens = key.shape[1], query.shape[2]
    groups = query.shape[1] // heads
    by_group = mask is not None and mask.shape[1] in (1, heads)
    if groups > 1 and new_tokens == 1 and (by_group if mask is not None else _is_read_often(key)):
        output = functional.scaled_dot_product_attention(
            query.reshape(query.shape[0], heads, groups, -1), key, value, attn_mask=mask, scale=scaling
        )
        return output.reshape(query.shape[0], 1, heads * groups, -1), None
    if mask is not None and groups > 1:
        if mask.shape[1] == heads != 1:
            mask = mask.repeat_interleave(groups, 1)
        if new_tokens > 1 and devices.at(key.device).attends_by_query_head:  # equal to transformers' copies
            output = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            return output.transpose(1, 2).contiguous(), None
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)


def _is_read_often(key: Tensor) -> bool:
    return key.shape[2] >= GROUPED_FROM and devices.at(key.device).attends_by_query_head


def _around(base: str) -> Kernel:
    kernel: Kernel = {"eager": _eager, "sdpa": _sdpa, flash.FLASH: flash.attend}[base]
    stock: Kernel = ALL_ATTENTION_FUNCTIONS[base] if base == "sdpa" else kernel

    def attention(
        module: Attention, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer: CompressedLayer | None = kwargs.pop(LAYER, None)
        if kwargs.pop(READS, False) and layer is not None:
            # During the prefill the module receives the keys as they were before any eviction.
            if key.shape[2] != layer.stored:
                return stock(module, query, key, value, attention_mask, **kwargs)
            return layer.attention(partial(kernel, module, **kwargs), query, key, value, attention_mask)
        if layer is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        if layer.fixed and layer.back_to_back and base != "eager":
            return varlen_layer.attend(module, query, layer, **kwargs)
        function = varlen_layer.attend if layer.back_to_back and not layer.fixed else kernel
        output = layer.attention(partial(function, module, **kwargs), query, key, value, attention_mask)
        if not layer.fixed:
            with torch.no_grad():  # scores and evictions are no part of any gradient
                layer.attended(query, module.scaling)
                SESSIONS[module].after_attention(module, query, layer)
        return output

    return attention


def register(base: str) -> str:
    """Register the attention and mask functions that wrap the implementation `base`; return their name.

    Raises:
        UnsupportedError: `base` is not supported.
    """
    if base not in SUPPORTED_BASES:
        raise UnsupportedError(
            f"attention={base} cannot carry a compressed cache; allowed: {', '.join(SUPPORTED_BASES)} "
            "(sdpa already uses PyTorch's flash kernel in the prefill)"
        )
    is_flash = base == flash.FLASH
    name = flash.NAME if is_flash else f"mmkv_{base}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _around(base))
        AttentionMaskInterface.register(name, flash.padding_mask if is_flash else ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name

"""The registered attention function: the stock kernel, seeing a compressed cache through its mapped mask.

`transformers` calls `mmkv_sdpa` or `mmkv_eager` for the text layers of an attached model only; the vision tower keeps
its own implementation. A mask function is registered under the same names, because a name without one would silently
get no mask at all and padding would be attended to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.errors import UnsupportedError

SUPPORTED_BASES = ("sdpa", "eager")


Kernel = Callable[..., tuple[Tensor, Tensor | None]]


class Attention(Protocol):
    """What is asked of a model's attention module."""

    layer_idx: int
    scaling: float
    head_dim: int
    q_proj: nn.Linear


class Serving(Protocol):
    """What the attention function asks of the session that serves a module."""

    def layer_of_call(self, module: Attention) -> CompressedLayer | None: ...

    def after_attention(self, module: Attention, query: Tensor, layer: CompressedLayer) -> None: ...


# Which session serves an attention module; attention functions receive the module and nothing of ours.
SESSIONS: WeakKeyDictionary[Attention, Serving] = WeakKeyDictionary()


def _eager(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T * scaling + mask) V with the softmax in float32; transformers keeps its own out of the registry."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if mask is not None:
        weights = weights + mask
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _around(base: str) -> Kernel:
    stock: Kernel = _eager if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]

    def attention(
        module: Attention, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        session = SESSIONS.get(module)
        if session is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        layer = session.layer_of_call(module)
        if layer is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        output = layer.attention(partial(stock, module, **kwargs), query, key, value, attention_mask)
        with torch.no_grad():  # scores and evictions are no part of any gradient
            layer.attended(query, module.scaling)
            session.after_attention(module, query, layer)
        return output

    return attention


def register(base: str) -> str:
    """Register the attention and mask functions around `base`; returns the implementation's name.

    Raises:
        UnsupportedError: for another base. Flash attention is reached through sdpa, whose prefill uses PyTorch's own
            flash kernel; transformers' `flash_attention_2` re-reads the implementation's name and cannot be wrapped.
    """
    if base not in SUPPORTED_BASES:
        raise UnsupportedError(
            f"attention={base} cannot carry a compressed cache; allowed: {', '.join(SUPPORTED_BASES)} "
            "(sdpa already uses PyTorch's flash kernel in the prefill)"
        )
    name = f"mmkv_{base}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _around(base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name

"""Layers that are not compressed, beside compressed ones: transformers' sliding windows and recurrent states.

Each stores a state of a whole sequence and cannot forget a token by dropping slots. `crop(-1)` of a recurrent state even
returns without any effect. A caller that feeds tokens again must restore a copy that was made before these tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from mmkv_bench.errors import UnsupportedError

FULL = "full_attention"
SLIDING, LINEAR = "sliding_attention", "linear_attention"
READER = "dummy"
"""Kind of a layer that stores nothing: it reads the keys and values of an earlier layer (Gemma 4)."""
_STATES = ("conv_states", "recurrent_states")
_PER_STATE = (
    *_STATES,
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def check_layers(owner: str, config: Any) -> list[str]:
    """Return the kind of every layer of a text model's config.

    Raises:
        UnsupportedError: a layer's kind can be neither compressed nor kept unchanged, or no layer can be compressed.
    """
    kinds: list[str] = get_layer_types_and_kwargs(config)[0]
    supported_kinds = {FULL, SLIDING, LINEAR} | ({READER} if getattr(config, "num_kv_shared_layers", 0) else set())
    other = sorted(set(kinds) - supported_kinds)
    if other or FULL not in kinds:
        raise UnsupportedError(
            f"{owner} has {', '.join(other or sorted(set(kinds)))} layers; allowed: {FULL} layers (at least one; "
            f"compressed), {SLIDING} and {LINEAR} layers (not compressed); choose a model with only these"
        )
    return kinds


def readers(config: Any) -> dict[int, int]:
    """Map each full-attention layer that stores no entries to the layer whose keys and values it reads."""
    kinds, stated_types = get_layer_types_and_kwargs(config)[0], list(getattr(config, "layer_types", None) or [])
    reader_indices = [i for i, kind in enumerate(kinds) if kind == READER and stated_types[i] == FULL]
    return {i: max(j for j, kind in enumerate(kinds) if kind == FULL) for i in reader_indices}


def state_layer(config: Any, index: int) -> Any:
    """Return transformers' own empty cache layer for the layer `index`, which is not compressed."""
    kinds, arguments = get_layer_types_and_kwargs(config)
    return DYNAMIC_LAYER_TYPE_MAPPING[kinds[index]](**arguments[index])


def map_tensors(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a layer that is not compressed, with `change` applied to each of its tensors."""
    changed_layer = copy.copy(layer)
    if isinstance(layer, LinearAttentionLayer):
        for name in _PER_STATE:
            setattr(changed_layer, name, dict(getattr(layer, name)))
        for name in _STATES:
            setattr(
                changed_layer,
                name,
                {i: None if one is None else change(one) for i, one in getattr(layer, name).items()},
            )
    elif layer.is_initialized and layer.keys is not None:
        changed_layer.keys, changed_layer.values = change(layer.keys), change(layer.values)
    return changed_layer


def tensors(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer that is not compressed: convolution and recurrent states, or keys and values of a window."""
    if isinstance(layer, LinearAttentionLayer):
        return [one for name in _STATES for one in getattr(layer, name).values() if one is not None]
    return [layer.keys, layer.values] if layer.is_initialized and layer.keys is not None else []


def concatenate(layers: Sequence[Any]) -> Any:
    """Join layers that have been shown the same number of tokens into one layer with all their rows."""
    tensor_groups = iter(list(zip(*(tensors(layer) for layer in layers), strict=True)))
    return map_tensors(layers[0], lambda _: torch.cat(next(tensor_groups)))


def nbytes(layers: Sequence[Any]) -> int:
    return sum(one.numel() * one.element_size() for layer in layers for one in tensors(layer))

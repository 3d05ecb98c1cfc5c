"""What a stock model computes, and its decoding from a cache whose entries a test has replaced. No product code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tests import reference, zoo

Call = tuple[
    Tensor, Tensor, Tensor
]  # query [Hq,n,D], key [Hkv,S,D], value [Hkv,S,D] of one forward, after the rotation


def watch(model: nn.Module, inputs: dict[str, Tensor], tokens: int = 1) -> list[list[Call]]:
    """Per layer the attention inputs of the prefill and of each further step of a greedy answer of `tokens` tokens."""
    calls: dict[int, list[Call]] = {}

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any):
        calls.setdefault(module.layer_idx, []).append((query[0].clone(), key[0].clone(), value[0].clone()))
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * options["scaling"]
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("watched", attention)
    AttentionMaskInterface.register("watched", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.get_decoder().config._attn_implementation
    zoo.set_attention(model, "watched")
    try:
        reference.generate(model, inputs, tokens)
    finally:
        zoo.set_attention(model, before)
    return [calls[layer] for layer in sorted(calls)]


def decode_from(
    model: nn.Module,
    inputs: dict[str, Tensor],
    kept: list[list[list[int]]],
    entries: list[tuple[list[Tensor], list[Tensor]]],
    forwards: int,
    tokens: int,
) -> reference.Run:
    """Greedy decoding by the stock model from a full cache that is changed after `forwards` forward passes.

    From then on layer l, head h sees of what is stored the slots `kept[l][h]`, whose keys and values are
    `entries[l][0][h]` and `entries[l][1][h]`, `[m, D]`, and what comes after.
    """
    cut = inputs["input_ids"].shape[1] + forwards - 1
    keep = []
    for heads in kept:
        columns = torch.zeros(1, len(heads), cut, dtype=torch.bool)
        for h, slots in enumerate(heads):
            columns[0, h, slots] = True
        keep.append(columns)
    done = 0

    def replace(*_: Any) -> None:
        nonlocal done
        done += 1
        if done != forwards:
            return
        for layer, heads, (keys, values) in zip(cache.layers, kept, entries, strict=True):
            for h, slots in enumerate(heads):
                layer.keys[0, h, slots] = keys[h].to(layer.keys.dtype)
                layer.values[0, h, slots] = values[h].to(layer.values.dtype)

    with reference.masked(model, reference.visible(keep, cut)) as cache:
        hook = model.get_decoder().register_forward_hook(replace)
        try:
            return reference.generate(model, inputs, tokens, past_key_values=cache)
        finally:
            hook.remove()


def types_of(model: nn.Module, inputs: dict[str, Tensor]) -> list[int]:
    """0 text, 1 image, 2 video, from the ids and the model's config."""
    names = {getattr(model.config, f"{kind}_token_id", None): i for i, kind in ((1, "image"), (2, "video"))}
    return [names.get(token, 0) for token in inputs["input_ids"][0].tolist()]

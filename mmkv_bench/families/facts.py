"""Facts about the supported Hugging Face model families, read from a config; nothing is loaded here.

One row of `FAMILIES` per `model_type`: which token ids mark visual content, which token closes it, which text
backbones are known to work. Everything else (layers, heads, head_dim) is read from the text config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.protocols import CUTTING, WHOLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
TEXT, IMAGE, VIDEO = 0, 1, 2
"""Token types of `token_types`; the same numbers as the `mm_token_type_ids` of Hugging Face processors."""


@dataclass(frozen=True)
class _Facts:
    """What a config cannot tell: attribute names, the closing marker, known text backbones (text `model_type`s)."""

    name: str
    backbones: tuple[str, ...]
    image_attribute: str | None = None
    video_attribute: str | None = None
    closing_attribute: str | None = None
    closing_marker: str | None = None


_LLAVA_BACKBONES = ("llama", "mistral", "qwen2")

FAMILIES = {
    "qwen2_vl": _Facts("Qwen2-VL", ("qwen2_vl_text",), "image_token_id", "video_token_id", "vision_end_token_id"),
    "qwen2_5_vl": _Facts("Qwen2.5-VL", ("qwen2_5_vl_text",), "image_token_id", "video_token_id", "vision_end_token_id"),
    "qwen3_vl": _Facts("Qwen3-VL", ("qwen3_vl_text",), "image_token_id", "video_token_id", "vision_end_token_id"),
    "llava": _Facts("LLaVA-1.5", _LLAVA_BACKBONES, "image_token_id"),
    "llava_next": _Facts("LLaVA-NeXT", _LLAVA_BACKBONES, "image_token_id"),
    "llava_next_video": _Facts("LLaVA-NeXT-Video", _LLAVA_BACKBONES, "image_token_id", "video_token_id"),
    "llava_onevision": _Facts("LLaVA-OneVision", ("qwen2",), "image_token_id", "video_token_id"),
    "llava_video": _Facts("LLaVA-Video", ("qwen2",), "image_token_id", "video_token_id"),
    # The HF port feeds videos as one <img>...</img> block per frame, so it has no video token.
    "internvl": _Facts("InternVL", ("qwen2", "qwen3", "llama"), "image_token_id", closing_marker="</img>"),
    "llama": _Facts("Llama (text)", ("llama",)),
    "mistral": _Facts("Mistral (text)", ("mistral",)),
    "qwen2": _Facts("Qwen2 (text)", ("qwen2",)),
    "qwen3": _Facts("Qwen3 (text)", ("qwen3",)),
}


@dataclass(frozen=True)
class Family:
    """One model's facts. Token ids are empty tuples where the family has none.

    `closing_marker` is the text of a closing token whose id only the tokenizer knows (InternVL); its id is in
    `closing_token_ids` when `family_of` was given a tokenizer. `max_context` is how many tokens the text model was made
    for (`max_position_embeddings`), None where its config does not say.
    """

    name: str
    model_type: str
    text_model_type: str
    image_token_ids: tuple[int, ...]
    video_token_ids: tuple[int, ...]
    closing_token_ids: tuple[int, ...]
    closing_marker: str | None
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int | None = None

    @property
    def multimodal(self) -> bool:
        return bool(self.image_token_ids or self.video_token_ids)

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads


def supported_families() -> tuple[str, ...]:
    """Names of the supported families, for messages and documentation."""
    return tuple(facts.name for facts in FAMILIES.values())


def text_config(config: Any) -> Any:
    """The config of the text model: `config.text_config` of a multimodal model, `config` itself of a text model."""
    return config.get_text_config(decoder=True)


def family_of(config: Any, tokenizer: Any = None) -> Family:
    """The facts of the model described by a transformers config.

    Args:
        config: a `PreTrainedConfig` of the whole model, or what a config.json states (`models.stated`).
        tokenizer: resolves closing markers that no config names (InternVL's `</img>`).

    Raises:
        UnsupportedError: unknown `model_type` or text backbone, or layers whose attention is not full attention.
    """
    facts = FAMILIES.get(config.model_type)
    if facts is None:
        raise UnsupportedError(
            f"model_type {config.model_type!r} is not supported; supported families: "
            f"{', '.join(supported_families())}. Choose a model folder of one of these."
        )
    text = text_config(config)
    if text.model_type not in facts.backbones:
        raise UnsupportedError(
            f"{facts.name} with a {text.model_type!r} text model is not supported; supported text models of this "
            f"family: {', '.join(facts.backbones)}. Choose a checkpoint with one of these."
        )
    if not getattr(config, "attends_to_all", False):
        _refuse_partial_attention(facts, text)
    query_heads = text.num_attention_heads
    return Family(
        name=facts.name,
        model_type=config.model_type,
        text_model_type=text.model_type,
        image_token_ids=_ids(config, facts.image_attribute),
        video_token_ids=_ids(config, facts.video_attribute),
        closing_token_ids=_ids(config, facts.closing_attribute) or _marker_ids(facts.closing_marker, tokenizer),
        closing_marker=facts.closing_marker,
        num_layers=text.num_hidden_layers,
        num_query_heads=query_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or query_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // query_heads,
        max_context=getattr(text, "max_position_embeddings", None),
    )


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The text model (decoder) of a loaded model: has `.layers`, `.rotary_emb` and `.embed_tokens`."""
    return model.get_decoder()


def token_types(input_ids: Tensor, family: Family) -> Tensor:
    """int64 tensor of the shape of `input_ids`: 0 text, 1 image, 2 video.

    Markers around visual tokens (start, end) count as text, as they do in Hugging Face's `mm_token_type_ids`.
    """
    import torch

    types = torch.full_like(input_ids, TEXT, dtype=torch.long)
    for kind, ids in ((IMAGE, family.image_token_ids), (VIDEO, family.video_token_ids)):
        for token in ids:
            types[input_ids == token] = kind
    return types


def context_length(input_ids: Tensor, family: Family, tokenizer: Any = None) -> int:
    """Tokens of the prompt's context, where a protocol cuts it.

    That is the prompt up to and including the last visual token and, where one follows directly, its closing marker.
    InternVL's marker is known only with a tokenizer (here or in `family_of`); without one its context ends at the
    last visual token.

    Args:
        input_ids: [T] or [1, T], one prompt without padding on the right.

    Raises:
        UnsupportedError: no visual token in the prompt.
        ValueError: more than one prompt.
    """
    if input_ids.numel() != input_ids.shape[-1]:
        raise ValueError(f"context_length takes one prompt, [T] or [1, T]; got shape {tuple(input_ids.shape)}")
    ids = input_ids.reshape(-1)
    visual = (token_types(ids, family) != TEXT).nonzero()
    if not len(visual):
        raise UnsupportedError(
            f"protocol={' and '.join(CUTTING)} cut a prompt behind its visual tokens, and this one is text only; "
            f"use {' or '.join(f'protocol={name}' for name in WHOLE)} for it"
        )
    end = int(visual[-1]) + 1
    closing = family.closing_token_ids or _marker_ids(family.closing_marker, tokenizer)
    return end + 1 if end < len(ids) and int(ids[end]) in closing else end


def kv_bytes_per_token(model: Any, dtype: torch.dtype | str) -> int:
    """Bytes that one token's keys and values take in all layers and KV heads of an uncompressed cache of a model, given as
    a `Family` or by its config."""
    family = model if isinstance(model, Family) else family_of(model)
    size = _BYTES[dtype] if isinstance(dtype, str) else dtype.itemsize
    return 2 * family.num_layers * family.num_kv_heads * family.head_dim * size


def _ids(config: Any, attribute: str | None) -> tuple[int, ...]:
    value = getattr(config, attribute, None) if attribute else None
    return () if value is None else (int(value),)


def _marker_ids(marker: str | None, tokenizer: Any) -> tuple[int, ...]:
    if marker is None or tokenizer is None:
        return ()
    token = tokenizer.convert_tokens_to_ids(marker)
    # A tokenizer without the marker answers None or its unknown token: neither closes anything.
    return () if token is None or token == getattr(tokenizer, "unk_token_id", None) else (int(token),)


def _refuse_partial_attention(facts: _Facts, text: Any) -> None:
    """Entries outside a sliding window are gone for the model itself, so a budget over all tokens means nothing."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, _ = get_layer_types_and_kwargs(text)
    partial = [i for i, kind in enumerate(kinds) if kind != "full_attention"]
    if partial:
        raise UnsupportedError(
            f"{facts.name}: layers {partial[0]} to {partial[-1]} ({len(partial)} of {len(kinds)}) use "
            f"{kinds[partial[0]]} (sliding_window={getattr(text, 'sliding_window', None)}); only full attention in "
            "every layer is supported, because such layers drop tokens by themselves. Choose a checkpoint without it."
        )

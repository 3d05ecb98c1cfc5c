"""Tiny random models of every supported family (float32, CPU, no hub) with prompts that fit them.

Shapes are tiny, structure is true: vision tower, projector, text model, RoPE kind, GQA or MHA, visual tokens that are
really replaced by features. Attention is sharpened (default init attends almost evenly), so an eviction moves logits
by about 1 and a test that compares logits to 2e-6 can fail.

    model = zoo.model("qwen2_5_vl", attention="sdpa")     # cached, shared by all tests of a session
    inputs = zoo.prompt("qwen2_5_vl")                      # keyword arguments of model.generate
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

VOCABULARY = 300
PAD, IMAGE, VIDEO, VISION_START, VISION_END = 0, 290, 291, 292, 293
LAYERS, HEADS, HEAD_DIM = 3, 8, 16

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
_GQA, _MHA = dict(_TEXT, num_key_value_heads=2), dict(_TEXT, num_key_value_heads=HEADS)
_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_TILE = dict(_TOWER, num_hidden_layers=3, image_size=28, patch_size=7)  # 4x4 patches per tile
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}

_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class Entry:
    """How to make one model's config and prompts. `visual(generator)` -> (visual segments, their tensors)."""

    make_config: Callable[[], Any]
    model_class: str
    visual: Callable[[torch.Generator], tuple[list[list[int]], dict[str, Tensor]]] | None = None


def _qwen_text(sections: list[int], **extra: Any) -> dict[str, Any]:
    return dict(
        _GQA, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}, **extra
    )


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "patch_size": 14, "mlp_ratio": 2}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    return tf.Qwen2VLConfig(text_config=_qwen_text([2, 3, 3]), vision_config=vision, **_SPECIAL)


def _qwen2_5_vl() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 14,
        "out_hidden_size": 128,
    }
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1]}
    return tf.Qwen2_5_VLConfig(text_config=_qwen_text([2, 3, 3]), vision_config=vision, **_SPECIAL)


def _qwen3_vl() -> Any:
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 16,
        "out_hidden_size": 128,
    }
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    text = _qwen_text([4, 2, 2], head_dim=HEAD_DIM)
    return tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_SPECIAL)


def _clip_llava(config_class: Any, text: Any, **extra: Any) -> Any:
    vision = tf.CLIPVisionConfig(**_TILE, projection_dim=64)
    return config_class(vision_config=vision, text_config=text, image_token_index=IMAGE, **extra)


def _onevision() -> Any:
    vision = tf.SiglipVisionConfig(**_TILE, vision_use_head=False)
    extra = {"image_token_index": IMAGE, "video_token_index": VIDEO, "image_grid_pinpoints": _PINPOINTS}
    return tf.LlavaOnevisionConfig(vision_config=vision, text_config=tf.Qwen2Config(**_GQA), **extra)


def _internvl(text: Any) -> Any:
    vision = dict(_TOWER, num_hidden_layers=2, image_size=[28, 28], patch_size=[7, 7])
    extra = {"image_token_id": IMAGE, "image_seq_length": 4, "downsample_ratio": 0.5, "tie_word_embeddings": False}
    return tf.InternVLConfig(vision_config=vision, text_config=text, **extra)


def _smolvlm() -> Any:
    vision = dict(_TOWER, num_hidden_layers=2, image_size=28, patch_size=7)
    return tf.SmolVLMConfig(
        vision_config=vision, text_config=tf.LlamaConfig(**_GQA), image_token_id=IMAGE, scale_factor=2
    )


def _next(text: Any) -> Any:
    return _clip_llava(tf.LlavaNextConfig, text, image_grid_pinpoints=_PINPOINTS)


def _grid(patch: int, token: int, grids: list[list[int]]) -> Callable[[torch.Generator], Any]:
    """Qwen-VL visual input: flattened patches and their grid; each grid of t*h*w patches becomes t*h*w/4 tokens."""

    def visual(generator: torch.Generator) -> tuple[list[list[int]], dict[str, Tensor]]:
        grid = torch.tensor(grids)
        pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * patch * patch, generator=generator)
        image = token == IMAGE
        names = ("pixel_values", "image_grid_thw") if image else ("pixel_values_videos", "video_grid_thw")
        segments = [[VISION_START] + [token] * (int(g.prod()) // 4) + [VISION_END] for g in grid]
        return segments, dict(zip(names, (pixels, grid), strict=True))

    return visual


def _qwen3_video(generator: torch.Generator) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Qwen3-VL wraps every frame of a video in its own pair of vision markers."""
    _, tensors = _grid(16, VIDEO, [[2, 4, 8]])(generator)
    return [[VISION_START] + [VIDEO] * 8 + [VISION_END]] * 2, tensors


def _tiles(token: int, count: int, *shape: int, **extra: Any) -> Callable[[torch.Generator], Any]:
    """LLaVA/InternVL visual input: `count` visual tokens from random pixels of `shape`."""

    def visual(generator: torch.Generator) -> tuple[list[list[int]], dict[str, Tensor]]:
        name = "pixel_values" if token == IMAGE else "pixel_values_videos"
        tensors = {name: torch.randn(*shape, 3, 28, 28, generator=generator)}
        return [[token] * count], tensors | {key: torch.tensor(value) for key, value in extra.items()}

    return visual


_IMAGES, _CLASS = [[1, 8, 8], [1, 4, 4]], "ForConditionalGeneration"
# 56x56 pixels: one base tile of 16 tokens and 8x8 tokens with 8 newlines = 88 tokens.
_NEXT_TILES = _tiles(IMAGE, 88, 1, 5, image_sizes=[[56, 56]])

_ENTRIES: dict[str, Entry] = {
    "qwen2_vl": Entry(_qwen2_vl, "Qwen2VL" + _CLASS, _grid(14, IMAGE, _IMAGES)),
    "qwen2_5_vl": Entry(_qwen2_5_vl, "Qwen2_5_VL" + _CLASS, _grid(14, IMAGE, _IMAGES)),
    "qwen2_5_vl_video": Entry(_qwen2_5_vl, "Qwen2_5_VL" + _CLASS, _grid(14, VIDEO, [[2, 4, 8]])),
    "qwen3_vl": Entry(_qwen3_vl, "Qwen3VL" + _CLASS, _grid(16, IMAGE, _IMAGES)),
    "qwen3_vl_video": Entry(_qwen3_vl, "Qwen3VL" + _CLASS, _qwen3_video),
    "llava": Entry(lambda: _clip_llava(tf.LlavaConfig, tf.LlamaConfig(**_MHA)), "Llava" + _CLASS, _tiles(IMAGE, 16, 1)),
    "llava_next": Entry(lambda: _next(tf.LlamaConfig(**_MHA)), "LlavaNext" + _CLASS, _NEXT_TILES),
    "llava_next_mistral": Entry(
        lambda: _next(tf.MistralConfig(**_GQA, sliding_window=None)), "LlavaNext" + _CLASS, _NEXT_TILES
    ),
    "llava_next_qwen2": Entry(lambda: _next(tf.Qwen2Config(**_GQA)), "LlavaNext" + _CLASS, _NEXT_TILES),
    "llava_next_video": Entry(
        lambda: _clip_llava(
            tf.LlavaNextVideoConfig, tf.LlamaConfig(**_MHA), image_grid_pinpoints=_PINPOINTS, video_token_index=VIDEO
        ),
        "LlavaNextVideo" + _CLASS,
        _tiles(VIDEO, 16, 1, 4),  # 4 frames, pooled to 2x2
    ),
    "llava_onevision": Entry(_onevision, "LlavaOnevision" + _CLASS, _NEXT_TILES),
    "llava_onevision_video": Entry(
        _onevision, "LlavaOnevision" + _CLASS, _tiles(VIDEO, 13, 1, 3)
    ),  # 3 frames x 4 + newline
    "internvl": Entry(lambda: _internvl(tf.Qwen2Config(**_GQA)), "InternVL" + _CLASS, _tiles(IMAGE, 24, 6)),
    "internvl_qwen3": Entry(
        lambda: _internvl(tf.Qwen3Config(**_GQA, head_dim=HEAD_DIM)), "InternVL" + _CLASS, _tiles(IMAGE, 24, 6)
    ),
    "smolvlm": Entry(_smolvlm, "SmolVLM" + _CLASS, _tiles(IMAGE, 24, 1, 6)),  # 6 tiles of 4
    "llama": Entry(lambda: tf.LlamaConfig(**_GQA), "LlamaForCausalLM"),
    "qwen2": Entry(lambda: tf.Qwen2Config(**_GQA), "Qwen2ForCausalLM"),
}

ALL = tuple(_ENTRIES)
_KINDS = ["{}_attention", "full_attention"] * 2


def _qwen3_5_text() -> dict[str, Any]:
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    kinds = [kind.format("linear") for kind in _KINDS]
    return (
        _GQA | linear | {"num_hidden_layers": 4, "head_dim": HEAD_DIM, "layer_types": kinds, "rope_parameters": partial}
    )


def _qwen3_5_vl() -> Any:
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "patch_size": 16}
    vision |= {"out_hidden_size": 128, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64}
    return tf.Qwen3_5Config(text_config=_qwen3_5_text(), vision_config=vision, **_SPECIAL)


def _gemma3_text() -> dict[str, Any]:
    return _GQA | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,  # of random weights the last token would answer
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 16,
        "layer_types": [kind.format("sliding") for kind in _KINDS],
    }


def _gemma4_text() -> Any:
    """The last two layers read the two before them; full ones have wider heads, fewer of keys, and no projection of values."""
    return tf.Gemma4TextConfig(
        **_GQA | {"num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": HEAD_DIM, "tie_word_embeddings": False},
        global_head_dim=2 * HEAD_DIM,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        sliding_window=16,
        layer_types=[kind.format("sliding") for kind in ("{}_attention", "full_attention") * 3],
    )


def _gemma3_vl() -> Any:
    vision = _TILE | {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "vision_use_head": False}
    ids = {"image_token_index": IMAGE, "boi_token_index": VISION_START, "eoi_token_index": VISION_END}
    text = tf.Gemma3TextConfig(**_gemma3_text())
    return tf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=16, tie_word_embeddings=False, **ids
    )


def _gemma3_pictures(generator: torch.Generator) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Two pictures of 16 tokens, one more than a window holds."""
    segment = [VISION_START] + [IMAGE] * 16 + [VISION_END]
    return [segment, segment], {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}


_ENTRIES |= {
    "qwen3_5": Entry(lambda: tf.Qwen3_5TextConfig(**_qwen3_5_text()), "Qwen3_5ForCausalLM"),
    "qwen3_5_vl": Entry(_qwen3_5_vl, "Qwen3_5" + _CLASS, _grid(16, IMAGE, _IMAGES)),
    "gemma3": Entry(lambda: tf.Gemma3TextConfig(**_gemma3_text()), "Gemma3ForCausalLM"),
    "gemma3_vl": Entry(_gemma3_vl, "Gemma3" + _CLASS, _gemma3_pictures),
    "gemma4": Entry(_gemma4_text, "Gemma4ForCausalLM"),
    "gpt_oss": Entry(
        lambda: tf.GptOssConfig(
            **_GQA | {"num_hidden_layers": 4, "intermediate_size": 64},
            head_dim=HEAD_DIM,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=[kind.format("sliding") for kind in _KINDS],
        ),
        "GptOssForCausalLM",
    ),
}
HYBRID = ("qwen3_5", "gemma3", "gpt_oss")
"""Text models whose first and third layer keep a state (recurrent, a window of 16) and are not compressed."""
TEXT_ONLY = tuple(name for name in ALL if _ENTRIES[name].visual is None)
MULTIMODAL = tuple(name for name in ALL if name not in TEXT_ONLY)
FEW = ("qwen2_5_vl", "qwen3_vl", "llava_next", "internvl", "llama")
"""mrope GQA, interleaved mrope with query norm, long MHA, 1-D GQA, text only: for promises that do not vary further."""


def build(name: str, seed: int = 0) -> tf.PreTrainedModel:
    """A fresh model of the zoo, sdpa, without EOS (so that every run has the asked length)."""
    entry = _ENTRIES[name]
    torch.manual_seed(seed)
    model = getattr(tf, entry.model_class)(entry.make_config()).eval()
    text = model.get_decoder()
    with torch.no_grad():
        for layer in text.layers:
            if not hasattr(layer, "self_attn"):
                continue
            for projection in ("q_proj", "k_proj", "v_proj"):
                if getattr(layer.self_attn, projection, None) is not None:  # Gemma 4 lacks some
                    getattr(layer.self_attn, projection).weight.mul_(8.0)
            if name == "gpt_oss":  # from -4 to 12: some heads give most to no key, some nearly all to keys
                layer.self_attn.sinks.copy_(torch.linspace(-4.0, 12.0, HEADS))
                layer.self_attn.q_proj.bias.normal_()
        if name == "gemma3_vl":  # zeros otherwise
            model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.1)
        text.embed_tokens.weight.mul_(25.0 / float(getattr(text.embed_tokens, "embed_scale", 1.0)))  # Gemma scales them
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


_shared = functools.cache(build)


def config(name: str) -> Any:
    """A fresh config of this name; unlike `model(name)` it leaves the shared model's settings alone."""
    return _ENTRIES[name].make_config()


def model(name: str, attention: str = "sdpa", eos: int | None = None) -> tf.PreTrainedModel:
    """The session's shared model of this name, set to one attention implementation of its text model and one EOS id.

    gpt-oss has eager attention alone."""
    shared = _shared(name)
    set_attention(shared, "eager" if name == "gpt_oss" else attention)
    shared.generation_config.eos_token_id = eos
    return shared


def full_attention(model: tf.PreTrainedModel) -> list[torch.nn.Module]:
    """The attention modules of the layers that are compressed: all but sliding and linear ones."""
    kinds = get_layer_types_and_kwargs(model.get_decoder().config)[0]
    layers = zip(model.get_decoder().layers, kinds, strict=True)
    return [layer.self_attn for layer, kind in layers if kind == "full_attention"]


def readers(model: tf.PreTrainedModel) -> dict[torch.nn.Module, torch.nn.Module]:
    """Attention of full layers that store nothing -> that of the layer whose keys they read: the last full one that stores."""
    config, layers = model.get_decoder().config, model.get_decoder().layers
    if not getattr(config, "num_kv_shared_layers", 0):
        return {}
    kinds, stored = config.layer_types, full_attention(model)
    full = [layer.self_attn for layer, kind in zip(layers, kinds, strict=True) if kind == "full_attention"]
    return {module: stored[-1] for module in full if module not in stored}


def set_attention(model: tf.PreTrainedModel, attention: str) -> None:
    """Only the text model's implementation; a plain text model ignores the dict form without a word."""
    multimodal = model.config.get_text_config(decoder=True) is not model.config
    model.set_attn_implementation({"text_config": attention} if multimodal else attention)


def prompt(name: str, seed: int = 0, before: int = 5, after: int = 9) -> dict[str, Tensor]:
    """Inputs of one prompt: `before` text tokens, the visual tokens (with text between two images), `after` text
    tokens. Text-only families get 40 text tokens in the place of the visual ones."""
    entry, generator = _ENTRIES[name], torch.Generator().manual_seed(1000 + seed)
    segments, tensors = entry.visual(generator) if entry.visual else ([text(40, seed + 7)], {})
    ids = text(before, 3 * seed + 1)
    for i, segment in enumerate(segments):
        ids += (text(3, 3 * seed + 2) if i else []) + segment
    return inputs_of(name, ids + text(after, 3 * seed + 3), tensors)


def inputs_of(name: str, ids: list[int], tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Model inputs of one prompt given by its token ids and the tensors of its visual tokens."""
    input_ids = torch.tensor([ids])
    inputs = dict(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **(tensors or {}))
    if name.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl")):
        # Without it Qwen-VL silently falls back to one-dimensional positions.
        inputs["mm_token_type_ids"] = ((input_ids == IMAGE).int() + 2 * (input_ids == VIDEO).int()).int()
    if name == "gemma3_vl":  # without it a picture's tokens are causal
        inputs["token_type_ids"] = (input_ids == IMAGE).long()
    return inputs


def text(length: int, seed: int) -> list[int]:
    """`length` random ordinary token ids."""
    return torch.randint(2, 280, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def visual_only(name: str) -> dict[str, Tensor]:
    """A prompt of visual tokens alone (with the markers that belong to them)."""
    return prompt(name, before=0, after=0)


def without_visual(name: str, length: int = 12) -> dict[str, Tensor]:
    """A prompt of `length` text tokens for any family."""
    return inputs_of(name, text(length, 5))


def batch(prompts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Left-padded batch of single prompts; visual tensors are concatenated, as processors do."""
    longest = max(p["input_ids"].shape[1] for p in prompts)
    joined: dict[str, Tensor] = {}
    for key in prompts[0]:
        rows = [p[key] for p in prompts]
        if key in _PER_TOKEN:
            rows = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=PAD) for row in rows]
        joined[key] = torch.cat(rows)
    return joined


def with_ids(name: str, inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """The same visual tensors under other token ids [1, T]."""
    tensors = {key: value for key, value in inputs.items() if key not in _PER_TOKEN}
    return inputs_of(name, ids[0].tolist(), tensors)

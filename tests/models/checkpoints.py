"""Processor settings of one checkpoint per family, as `model.processor` of conf/model/*.yaml holds them, with small models.

Settings and special tokens are those of the published files (preprocessor_config.json, tokenizer_config.json), as of our
knowledge; `small_config` has the checkpoint's token ids, vocabulary, patch and image sizes, so that prompts have the true
length, and tiny widths.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers as tf

from mmkv_bench.models.processor import build_processor

_QWEN_NAMES = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_QWEN_TOKENS = {name: 151643 + i for i, name in enumerate(_QWEN_NAMES)}
_CHATML = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_SENTENCEPIECE = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "add_bos_token": True,
}
_LLAMA_TOKENS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001}
_CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
_CLIP_PATCHES = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_NEXT_GRID = {"image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_SIGLIP = {"size": {"height": 384, "width": 384}, **_HALF}
_OV_GRID = {"image_grid_pinpoints": [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)]}
_INTERN_NAMES = [
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
    "<video>",
]
_INTERN_TOKENS = {name: 151665 + i for i, name in enumerate(_INTERN_NAMES)}  # <video> lies beyond the embedding

_SMOLVLM = {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}
_SMOLVLM_NAMES = [
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<fake_token_around_image>",
    "<image>",
]
_SMOLVLM_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<end_of_utterance>": 49279}
_SMOLVLM_TOKENS |= {name: 49152 + i for i, name in enumerate(_SMOLVLM_NAMES)}


def _smolvlm_images(tile: int) -> dict[str, Any]:
    return {"size": {"longest_edge": 4 * tile}, "max_image_size": {"longest_edge": tile}, **_HALF}


SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {  # Qwen/Qwen2-VL-7B-Instruct
        "image": _PIXELS,
        "video": _PIXELS,
        "tokenizer": _CHATML,
        "special_tokens": _QWEN_TOKENS,
        "template": "qwen2_vl",
    },
    "qwen2_5_vl": {  # Qwen/Qwen2.5-VL-7B-Instruct
        "image": _PIXELS,
        "video": _PIXELS,
        "tokenizer": _CHATML,
        "special_tokens": _QWEN_TOKENS,
        "template": "qwen2_vl",
    },
    "qwen3_vl": {  # Qwen/Qwen3-VL-8B-Instruct
        "image": {
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            **_HALF,
        },
        "video": {
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "cap_pixels_per_frame": False,
            **_HALF,
        },
        "tokenizer": _CHATML,
        "special_tokens": _QWEN_TOKENS,
        "template": "qwen3_vl",
    },
    "llava": {  # llava-hf/llava-1.5-7b-hf
        "image": _CLIP,
        "processor": _CLIP_PATCHES,
        "tokenizer": _SENTENCEPIECE,
        "special_tokens": _LLAMA_TOKENS,
        "template": "vicuna",
    },
    "llava_next": {  # llava-hf/llava-v1.6-vicuna-7b-hf
        "image": {**_CLIP, **_NEXT_GRID},
        "processor": _CLIP_PATCHES,
        "tokenizer": _SENTENCEPIECE,
        "special_tokens": _LLAMA_TOKENS,
        "template": "vicuna",
    },
    "llava_next_mistral": {  # llava-hf/llava-v1.6-mistral-7b-hf
        "image": {**_CLIP, **_NEXT_GRID},
        "processor": _CLIP_PATCHES,
        "tokenizer": _SENTENCEPIECE,
        "special_tokens": _LLAMA_TOKENS,
        "template": "mistral",
    },
    "llava_next_video": {  # llava-hf/LLaVA-NeXT-Video-7B-hf
        "image": {**_CLIP, **_NEXT_GRID},
        "video": _CLIP,
        "processor": _CLIP_PATCHES,
        "tokenizer": _SENTENCEPIECE,
        "special_tokens": _LLAMA_TOKENS | {"<video>": 32000, "<image>": 32001, "<pad>": 32002},
        "template": "vicuna",
    },
    "llava_onevision": {  # llava-hf/llava-onevision-qwen2-7b-ov-hf
        "image": {**_SIGLIP, **_OV_GRID},
        "video": _SIGLIP,
        "processor": {
            "num_image_tokens": 729,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        "tokenizer": _CHATML,
        "special_tokens": dict(list(_QWEN_TOKENS.items())[:3]) | {"<image>": 151646, "<video>": 151647},
        "template": "onevision",
    },
    "internvl": {  # OpenGVLab/InternVL3-8B-hf
        "image": {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12},
        "video": {"size": {"height": 448, "width": 448}},
        "processor": {"image_seq_length": 256},
        "tokenizer": {
            **_CHATML,
            "extra_special_tokens": {
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
        },
        "special_tokens": _QWEN_TOKENS | _INTERN_TOKENS,
        "template": "internvl",
    },
    "idefics3": {  # HuggingFaceTB/SmolVLM-256M-Instruct
        "image": _smolvlm_images(512),
        "processor": {"image_seq_len": 64},
        "tokenizer": _SMOLVLM,
        "special_tokens": _SMOLVLM_TOKENS,
        "template": "smolvlm",
    },
    "smolvlm": {  # HuggingFaceTB/SmolVLM2-2.2B-Instruct
        "image": _smolvlm_images(384),
        "video": _smolvlm_images(384),
        "processor": {"image_seq_len": 81},
        "tokenizer": _SMOLVLM,
        "special_tokens": _SMOLVLM_TOKENS,
        "template": "smolvlm",
    },
    "gemma3": {  # google/gemma-3-4b-it
        "image": {"size": {"height": 896, "width": 896}, **_HALF},
        "processor": {"image_seq_length": 256},
        "tokenizer": {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "extra_special_tokens": {
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
        },
        "special_tokens": {
            "<pad>": 0,
            "<eos>": 1,
            "<bos>": 2,
            "<start_of_turn>": 105,
            "<end_of_turn>": 106,
            "<start_of_image>": 255999,
            "<end_of_image>": 256000,
            "<image_soft_token>": 262144,
        },
        "template": "gemma3",
    },
    "llama": {  # meta-llama/Meta-Llama-3-8B-Instruct
        "tokenizer": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"},
        "special_tokens": {
            "<|begin_of_text|>": 128000,
            "<|end_of_text|>": 128001,
            "<|start_header_id|>": 128006,
            "<|end_header_id|>": 128007,
            "<|eot_id|>": 128009,
        },
        "template": "llama3",
    },
}

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN_TEXT = _TEXT | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    "vocab_size": 152064,
}
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}


def _clip() -> Any:
    return tf.CLIPVisionConfig(**_TOWER, image_size=336, patch_size=14, projection_dim=16)


def _qwen(config_class: Any, depth_of: dict[str, Any], text: dict[str, Any]) -> Any:
    vision = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2} | depth_of
    return config_class(text_config=text, vision_config=vision, **_QWEN_IDS)


def small_config(name: str) -> Any:
    """A config with the checkpoint's ids and sizes of patches and images, and tiny widths."""
    llama = tf.LlamaConfig(**_TEXT, vocab_size=32064)
    if name == "qwen2_vl":
        return _qwen(tf.Qwen2VLConfig, {"embed_dim": 16, "hidden_size": 32, "patch_size": 14}, _QWEN_TEXT)
    if name == "qwen2_5_vl":
        vision = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 14}
        vision |= {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return _qwen(tf.Qwen2_5_VLConfig, vision, _QWEN_TEXT)
    if name == "qwen3_vl":
        vision = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 16}
        vision |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [0]}
        return _qwen(tf.Qwen3VLConfig, vision, _QWEN_TEXT | {"vocab_size": 151936, "head_dim": 16})
    if name == "llava":
        return tf.LlavaConfig(vision_config=_clip(), text_config=llama, image_token_index=32000)
    if name == "llava_next":
        return tf.LlavaNextConfig(vision_config=_clip(), text_config=llama, image_token_index=32000, **_NEXT_GRID)
    if name == "llava_next_mistral":
        text = tf.MistralConfig(**_TEXT, vocab_size=32064, sliding_window=None)
        return tf.LlavaNextConfig(vision_config=_clip(), text_config=text, image_token_index=32000, **_NEXT_GRID)
    if name == "llava_next_video":
        ids = {"video_token_index": 32000, "image_token_index": 32001}
        return tf.LlavaNextVideoConfig(vision_config=_clip(), text_config=llama, **ids, **_NEXT_GRID)
    if name == "llava_onevision":
        vision = tf.SiglipVisionConfig(**_TOWER, image_size=384, patch_size=14, vision_use_head=False)
        ids = {"image_token_index": 151646, "video_token_index": 151647}
        text = tf.Qwen2Config(**_TEXT, vocab_size=152000)
        return tf.LlavaOnevisionConfig(vision_config=vision, text_config=text, **ids, **_OV_GRID)
    if name == "internvl":
        vision = _TOWER | {"image_size": [448, 448], "patch_size": [14, 14]}
        text = tf.Qwen2Config(**_TEXT, vocab_size=151674)
        return tf.InternVLConfig(
            vision_config=vision, text_config=text, image_token_id=151667, image_seq_length=256, downsample_ratio=0.5
        )
    if name == "gemma3":
        vision = _TOWER | {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
        text = tf.Gemma3TextConfig(**_TEXT, vocab_size=262208, head_dim=16, layer_types=["full_attention"])
        return tf.Gemma3Config(text_config=text, vision_config=vision | {"vision_use_head": False})
    if name in ("idefics3", "smolvlm"):
        text = tf.LlamaConfig(**_TEXT, vocab_size=49280)
        if name == "smolvlm":
            vision = _TOWER | {"image_size": 384, "patch_size": 14}
            return tf.SmolVLMConfig(vision_config=vision, text_config=text, image_token_id=49190, scale_factor=3)
        vision = _TOWER | {"image_size": 512, "patch_size": 16}
        return tf.Idefics3Config(vision_config=vision, text_config=text, image_token_id=49190, scale_factor=4)
    return tf.LlamaConfig(**_TEXT, vocab_size=128256)


@cache
def processor(name: str) -> Any:
    """The processor of a checkpoint, one for all tests, which leave it as it is; half a second for a large vocabulary."""
    return build_processor(small_config(name), SETTINGS[name])

"""The embedded model's architecture: a stock Qwen2.5-VL of 0.82 M parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.tiny import vocabulary as v

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

HIDDEN = 128
HEAD_DIM = 32
AUXILIARY_LAYER = 2  # its outputs carry the auxiliary loss in training


def make_config() -> Qwen2_5_VLConfig:
    """4 layers, hidden 128, 4 query and 2 KV heads of 32, MLP 256; one vision block of width 64, 4 x 4 cell windows.

    mrope_section [1] * 16 deals the rotary frequencies to time, height and width in turn, so that each axis gets high
    ones; rope_theta 60 suits prompts of a few hundred positions.
    """
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": v.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 60.0, "mrope_section": [1] * (HEAD_DIM // 2)},
        "bos_token_id": v.PAD,
        "eos_token_id": v.IM_END,
        "pad_token_id": v.PAD,
        "initializer_range": 0.04,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [],
        "window_size": 112,
        "initializer_range": 0.04,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=v.IMAGE_PAD,
        video_token_id=v.VIDEO_PAD,
        vision_start_token_id=v.VISION_START,
        vision_end_token_id=v.VISION_END,
        tie_word_embeddings=True,
    )


def make_model(seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A model with random weights (float32, sdpa) set by the seed alone; the global generator stays as it was."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = make_config()
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)

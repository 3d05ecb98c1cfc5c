"""The shapes of conf/model, whole or narrowed to widths that a test can afford: ids, patches and structure stay true."""

from __future__ import annotations

from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import Model
from mmkv_bench.models.source import shaped

NAMES = shaped()
FAMILIES = ("qwen2_vl_7b", "qwen2_5_vl_7b", "qwen3_vl_8b", "llava_v1_5_7b", "llava_v1_6_vicuna_7b",
            "llava_v1_6_mistral_7b", "llava_onevision_7b", "llava_video_7b", "internvl3_8b", "smolvlm_256m",
            "smolvlm2_2_2b", "llama_3_8b", "gemma3_270m", "gemma3_4b", "gpt_oss_20b")  # fmt: skip
"""One model of every architecture."""

_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_attention_heads": 2, "embed_dim": 32,
           "out_hidden_size": 64, "projection_dim": 32}  # fmt: skip


def node(name: str, **changes: Any) -> Model:
    """The `model` node of a run of this model."""
    return Model(**content("model", name) | changes)


def small(name: str, **changes: Any) -> Model:
    """The same with random weights of a narrow model of three layers in float32 on the CPU."""
    made = node(name, weights="random", dtype="float32", device="cpu", **changes)
    shape = made.shape
    text, vision = shape.get("text_config", shape), shape.get("vision_config")
    text.update({key: value for key, value in _TEXT.items() if key in text})
    if "layer_types" in text:
        text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if "mrope_section" in text["rope_parameters"]:
        text["rope_parameters"]["mrope_section"] = [2, 3, 3]
    if vision is not None:
        old = vision["hidden_size"] if "embed_dim" not in vision else None
        vision.update({key: value for key, value in _VISION.items() if key in vision})
        if old is None:  # Qwen2-VL's tower calls its width embed_dim and its output hidden_size
            vision["hidden_size"] = text["hidden_size"]
    return made

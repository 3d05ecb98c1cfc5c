"""What a config.json says of a model by itself, read without transformers, whose import takes seconds.

Checkpoints and the shapes of `conf/model` mostly state all that planning asks: layers, heads, token ids. What one leaves
to the defaults of transformers' classes is not guessed here: `stated` then answers None, and transformers is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkv_bench.models.families import FAMILIES

_ASKED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_HEAD_DIM_FOLLOWS = ("llama", "mistral", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
"""Text models whose head_dim is hidden_size / num_attention_heads where their config does not state one."""
_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_next_video": "LlavaNextVideoForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type -> the class of transformers. A checkpoint that names another may be made for code of its own."""
_NO_WINDOW = ("llama", "qwen3_vl_text")
"""Text models that have no sliding window."""


class Stated:
    """A configuration that states all that `families.family_of` reads; attributes as those of transformers' configs."""

    attends_to_all = True
    """Every layer is stated to have full attention."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__["_values"]
        for key in (name, _OLDER.get(name), name.replace("_token_id", "_token_index")):
            if key in values:
                return values[key]
        raise AttributeError(name)

    def get_text_config(self, decoder: bool = True) -> Stated:
        """Of the text model; itself where the whole is one."""
        inner = self._values.get("text_config")
        return self if inner is None else Stated(inner)


_OLDER = {"dtype": "torch_dtype"}


def read(folder: str | Path) -> Stated | None:
    """The config.json of a folder, if it can be read and states enough."""
    try:
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stated(values) if isinstance(values, Mapping) else None


def stated(values: Mapping[str, Any]) -> Stated | None:
    """The configuration of these keys of config.json; None where they do not state all, or not what is supported."""
    facts = FAMILIES.get(str(values.get("model_type")))
    text = values.get("text_config", values)
    if facts is None or not isinstance(text, Mapping) or text.get("model_type") not in facts.backbones:
        return None
    if facts.name.endswith("(text)") == ("text_config" in values):
        return None
    found = Stated(values)
    if any(name != _CLASSES.get(values["model_type"]) for name in values.get("architectures") or ()):
        return None
    visual = (facts.image_attribute, facts.video_attribute, facts.closing_attribute)
    if any(attribute is not None and not isinstance(getattr(found, attribute, None), int) for attribute in visual):
        return None
    if not all(isinstance(text.get(key), int) for key in _ASKED):
        return None
    kind = text["model_type"]
    head_dim = isinstance(text.get("head_dim"), int) or (kind in _HEAD_DIM_FOLLOWS and "head_dim" not in text)
    return found if head_dim and _attends_to_all(kind, text) else None


def _attends_to_all(kind: str, text: Mapping[str, Any]) -> bool:
    """Whether every layer is stated to have full attention."""
    if text.get("layer_types") is not None:
        return set(text["layer_types"]) == {"full_attention"}
    if kind in _NO_WINDOW or text.get("use_sliding_window") is False:
        return True
    return kind == "mistral" and "sliding_window" in text and text["sliding_window"] is None

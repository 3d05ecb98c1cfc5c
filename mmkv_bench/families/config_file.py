"""A config.json read without transformers, whose import takes seconds.

Checkpoints and the shapes of `conf/model` mostly state all that planning asks: layers, heads, token ids. Defaults of
transformers' classes are not guessed: where one is needed, `stated` returns None and transformers is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkv_bench.families.base import TextModel
from mmkv_bench.families.registry import families

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_OLDER = {"dtype": "torch_dtype"}


class StatedConfig:
    """Keys of a config.json under the attributes of transformers' configs; all that `facts.model_facts` reads."""

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

    def get_text_config(self, decoder: bool = True) -> StatedConfig:
        """The text model's config; itself where the whole is a text model."""
        inner = self._values.get("text_config")
        return self if inner is None else StatedConfig(inner)


def read(folder: str | Path) -> StatedConfig | None:
    """The config.json of a folder; None where it cannot be read or does not state enough."""
    try:
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stated(values) if isinstance(values, Mapping) else None


def stated(values: Mapping[str, Any]) -> StatedConfig | None:
    """The config of these keys of config.json; None where they do not state all, or not what is supported."""
    known = families().get(str(values.get("model_type")))
    text = values.get("text_config", values)
    if known is None or not isinstance(text, Mapping) or bool(known.media) != ("text_config" in values):
        return None
    if any(name != known.model_class for name in values.get("architectures") or ()):  # perhaps for code of its own
        return None
    config, backbone = StatedConfig(values), known.text_model(str(text.get("model_type")))
    ids = (known.image_id_key, known.video_id_key, known.closing_id_key)
    complete = (
        backbone is not None
        and all(key is None or isinstance(getattr(config, key, None), int) for key in ids)
        and all(isinstance(text.get(key), int) for key in _NEEDED)
        and (isinstance(text.get("head_dim"), int) or (backbone.head_dim_follows and "head_dim" not in text))
        and _attends_to_all(backbone, text)
    )
    return config if complete else None


def _attends_to_all(backbone: TextModel, text: Mapping[str, Any]) -> bool:
    if text.get("layer_types") is not None:
        return set(text["layer_types"]) == {"full_attention"}
    switch = backbone.window_switch
    return switch is None or (switch in text and (text[switch] is False or text[switch] is None))

"""Facts of a model, read from the config by the rules of the model's family, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import FULL, NO_STATES, Family, States, TextModel
from mmkv_bench.families.registry import families, family
from mmkv_bench.protocols import CUTTING, SINGLE, WHOLE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Dtype -> bytes of a number."""
TEXT, IMAGE, VIDEO = 0, 1, 2
"""Token types of `token_types`; equal to the `mm_token_type_ids` of Hugging Face processors."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts of one model. Token ids are empty tuples if the model has none.

    Attributes:
        name: the family's name in messages.
        model_type: `model_type` of config.json.
        image_token_ids, video_token_ids: ids of visual tokens.
        closing_token_ids: ids of the token that follows the visual tokens; some are known only if `model_facts` gets a tokenizer.
        num_layers: number of compressed layers of the text model.
        num_query_heads, num_kv_heads, head_dim: shape of each compressed layer.
        states: the other layers, which keep a window or a recurrent state and are not compressed.
        max_context: longest context of the text model in tokens; None if unknown.
        sinks: see `base.TextModel`.
    """

    name: str
    model_type: str
    image_token_ids: tuple[int, ...]
    video_token_ids: tuple[int, ...]
    closing_token_ids: tuple[int, ...]
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int | None = None
    states: States = NO_STATES
    sinks: bool = False

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.states.layers

    @property
    def multimodal(self) -> bool:
        """Whether the model has tokens for images or videos."""
        return bool(self.image_token_ids or self.video_token_ids)

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def rules(self) -> Family:
        """The model's family."""
        return family(self.model_type)


def text_config(config: Any) -> Any:
    """Return the text model's config, which is `config` itself for a text model."""
    return config.get_text_config(decoder=True)


def model_facts(config: Any, tokenizer: Any = None) -> ModelFacts:
    """Read a model's facts.

    Args:
        config: a `PreTrainedConfig` of the whole model, or the keys of a config.json (`StatedConfig`).
        tokenizer: resolves closing markers that no config names (InternVL's `</img>`).

    Raises:
        UnsupportedError: unknown `model_type` or text backbone, or kinds of layers that the backbone does not support.
    """
    model_family, text = family(config.model_type), text_config(config)
    backbone = model_family.text_model(text.model_type)
    if backbone is None:
        raise UnsupportedError(
            f"{model_family.name} with a {text.model_type!r} text model is not supported; supported text models of this family: "
            f"{', '.join(one.model_type for one in model_family.text_models)}. Choose a checkpoint with one of these."
        )
    if isinstance(text, StatedConfig):
        kinds = backbone.kinds(text)
    else:
        from transformers.cache_utils import get_layer_types_and_kwargs

        kinds = list(get_layer_types_and_kwargs(text)[0])
    _refuse_other_layers(model_family, backbone, text, kinds)
    backbone.check(text)
    kv_heads, width = backbone.heads(text)
    return ModelFacts(
        name=model_family.name,
        model_type=config.model_type,
        image_token_ids=_ids(config, model_family.image_id_key),
        video_token_ids=_ids(config, model_family.video_id_key),
        closing_token_ids=_ids(config, model_family.closing_id_key)
        or _marker_ids(model_family.closing_marker, tokenizer),
        num_layers=kinds.count(FULL),
        num_query_heads=text.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        max_context=getattr(text, "max_position_embeddings", None),
        states=backbone.states(text, kinds),
        sinks=backbone.sinks,
    )


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model (decoder) of a loaded model: it has `.layers`, `.rotary_emb` and `.embed_tokens`."""
    return model.get_decoder()


def token_types(input_ids: Tensor, facts: ModelFacts) -> Tensor:
    """Return the type of each token, int64 of the shape of `input_ids`: 0 text, 1 image, 2 video.

    Markers around visual tokens (start, end) count as text, as in Hugging Face's `mm_token_type_ids`."""
    import torch

    types = torch.full_like(input_ids, TEXT, dtype=torch.long)
    for kind, ids in ((IMAGE, facts.image_token_ids), (VIDEO, facts.video_token_ids)):
        for token in ids:
            types[input_ids == token] = kind
    return types


def context_length(input_ids: Tensor, facts: ModelFacts) -> int:
    """Count the tokens of a prompt's context, which ends with the last visual token or a closing token right after it.

    Args:
        input_ids: [T] or [1, T], one prompt without padding on the right.

    Raises:
        UnsupportedError: no visual token in the prompt.
        ValueError: more than one prompt.
    """
    if input_ids.numel() != input_ids.shape[-1]:
        raise ValueError(f"context_length takes one prompt, [T] or [1, T]; got shape {tuple(input_ids.shape)}")
    ids = input_ids.reshape(-1)
    visual = (token_types(ids, facts) != TEXT).nonzero()
    if not len(visual):
        protocol_names = " and ".join(name for name in CUTTING if name in SINGLE)
        raise UnsupportedError(
            f"protocol={protocol_names} cut a prompt behind its visual tokens, but this prompt is text only; use "
            f"{' or '.join(f'protocol={name}' for name in WHOLE)}, or name the field of its document with "
            "datasets.<name>.context_key"
        )
    context_end = int(visual[-1]) + 1
    return (
        context_end + 1 if context_end < len(ids) and int(ids[context_end]) in facts.closing_token_ids else context_end
    )


def kv_bytes_per_token(model: Any, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all compressed layers. model: the model's facts or config."""
    facts = model if isinstance(model, ModelFacts) else model_facts(model)
    return 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * ITEMSIZE[dtype]


def state_bytes(facts: ModelFacts, tokens: int, dtype: str) -> int:
    """Return the bytes of sliding windows and recurrent states after a prompt of `tokens` tokens."""
    return facts.states.nbytes(tokens, 2 * facts.num_kv_heads * facts.head_dim, ITEMSIZE[dtype])


def share_of_all_state(facts: ModelFacts, tokens: int, kept: int, dtype: str) -> float:
    """Return the fraction of bytes that remains if `kept` entries per KV head are kept of a prompt of `tokens` tokens.

    Sliding windows and recurrent states count as bytes that always remain.
    """
    entry, uncompressed_bytes = kv_bytes_per_token(facts, dtype), state_bytes(facts, tokens, dtype)
    return (kept * entry + uncompressed_bytes) / (tokens * entry + uncompressed_bytes)


def full_state_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of sliding windows and recurrent states after a prompt that fills the windows."""
    return state_bytes(facts, facts.states.window, dtype)


def _ids(config: Any, attribute: str | None) -> tuple[int, ...]:
    value = getattr(config, attribute, None) if attribute else None
    return () if value is None else (int(value),)


def _marker_ids(marker: str | None, tokenizer: Any) -> tuple[int, ...]:
    if marker is None or tokenizer is None:
        return ()
    token = tokenizer.convert_tokens_to_ids(marker)
    # A tokenizer without the marker returns None or its unknown token: neither closes anything.
    return () if token is None or token == getattr(tokenizer, "unk_token_id", None) else (int(token),)


def _refuse_other_layers(known: Family, backbone: TextModel, text: Any, kinds: list[str]) -> None:
    """Raise UnsupportedError if a layer is of an unsupported kind, or none has full attention.

    A sliding layer, for example, drops tokens itself, so a budget over all tokens has no meaning for it.
    """
    partial = [i for i, kind in enumerate(kinds) if kind != FULL and kind not in backbone.beside]
    if partial:
        other_kinds_text = f", or {' or '.join(backbone.beside)}" if backbone.beside else " in every layer"
        raise UnsupportedError(
            f"{known.name}: layers {partial[0]} to {partial[-1]} ({len(partial)} of {len(kinds)}) use "
            f"{kinds[partial[0]]} (sliding_window={getattr(text, 'sliding_window', None)}), which drops tokens "
            f"itself; allowed: full attention{other_kinds_text}; choose a checkpoint without such layers"
        )
    if FULL not in kinds:
        raise UnsupportedError(
            f"{known.name}: none of the {len(kinds)} layers has full attention, but only such layers are "
            "compressed; choose more layers (model.layers) or another model"
        )


_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_OLDER = {"dtype": "torch_dtype"}


class StatedConfig:
    """The content of a config.json, with the attributes of transformers' configs that `model_facts` reads."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__["_values"]
        for key in (name, _OLDER.get(name), name.replace("_token_id", "_token_index")):
            if key in values:
                return values[key]
        raise AttributeError(name)

    def get_text_config(self, decoder: bool = True) -> StatedConfig:
        """Return the text model's config; the config itself for a text model."""
        inner = self._values.get("text_config")
        return self if inner is None else StatedConfig(inner)


def read(folder: str | Path) -> StatedConfig | None:
    """Return the config.json of a folder; None if it cannot be read, or if `stated` returns None."""
    try:
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stated(values) if isinstance(values, Mapping) else None


def stated(values: Mapping[str, Any]) -> StatedConfig | None:
    """Return the content of a config.json as a `StatedConfig`; None if a needed key is missing or the model is not supported."""
    model_family = families().get(str(values.get("model_type")))
    text = values.get("text_config", values)
    if model_family is None or not isinstance(text, Mapping) or bool(model_family.media) != ("text_config" in values):
        return None
    # Another class: perhaps the model brings its own code.
    if any(name != model_family.model_class for name in values.get("architectures") or ()):
        return None
    config, backbone = StatedConfig(values), model_family.text_model(str(text.get("model_type")))
    ids = (model_family.image_id_key, model_family.video_id_key, model_family.closing_id_key)
    complete = (
        backbone is not None
        and all(key is None or isinstance(getattr(config, key, None), int) for key in ids)
        and all(isinstance(text.get(key), int) for key in _NEEDED)
        and (isinstance(text.get("head_dim"), int) or (backbone.head_dim_follows and "head_dim" not in text))
        and _states_its_layers(backbone, text)
    )
    return config if complete else None


def _states_its_layers(backbone: TextModel, text: Mapping[str, Any]) -> bool:
    """Tell whether a config.json states all that `backbone` reads, with layers of supported kinds only."""
    if not backbone.states_all(text):
        return False
    if text.get("layer_types") is not None:
        return FULL in text["layer_types"] and set(text["layer_types"]) <= {FULL, *backbone.beside}
    switch = backbone.window_switch
    return not backbone.beside and (switch is None or text.get(switch, True) in (False, None))

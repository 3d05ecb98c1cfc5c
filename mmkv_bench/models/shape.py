"""`model.shape` of conf/model/*.yaml: a checkpoint's config.json as data, whole or with fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.models.families import family_of

GENERATION = "generation_config"
"""Key of a shape that is no part of config.json: generation_config.json as data."""

OWN = "llava_video"
"""The one architecture whose classes are ours (models/llava_video.py), made of transformers' LLaVA-OneVision."""

OWN_SCHEME = 1
"""Version of what these classes make of frames and prompts; part of the fingerprint of random weights."""

_DEPTHS = ("num_hidden_layers", "depth")  # of a vision tower, by family
_PER_LAYER = ("layer_types", "mlp_layer_types")


def config_of(shape: Mapping[str, Any], layers: int | None = None) -> Any:
    """The transformers config of a shape.

    Args:
        shape: keys of config.json, `model_type` among them.
        layers: layers of the text model, and at most so many of the vision tower; widths and heads stay true.

    Raises:
        ConfigError: a shape that is none, or more layers than it has.
        UnsupportedError: a family or text model outside the supported ones.
    """
    from transformers import AutoConfig

    values = values_of(shape, layers)
    kind = values.pop("model_type")
    if kind == OWN:
        from mmkv_bench.models.llava_video import register

        register()
    try:
        config = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise UnsupportedError(f"model.shape.model_type={kind} is no architecture of transformers: {error}") from error
    family_of(config)
    return config


def values_of(shape: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    """The keys of config.json that a shape comes to; arguments and ConfigError as of `config_of`."""
    values = plain({key: value for key, value in shape.items() if key != GENERATION})
    if values.get("model_type") is None:
        raise ConfigError("model.shape has no model_type; give the values of the checkpoint's config.json")
    if layers is not None:
        _shrink(values, layers)
    return values


def generation_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json of a shape."""
    return plain(shape.get(GENERATION) or {})


def _shrink(values: dict[str, Any], layers: int) -> None:
    text = values.get("text_config", values)
    true = text["num_hidden_layers"]
    if not 1 <= layers <= true:
        raise ConfigError(
            f"model.layers={layers}: this model has {true} layers; allowed: 1 to {true}; give such a number"
        )
    text["num_hidden_layers"] = layers
    for key in _PER_LAYER:
        if text.get(key) is not None:
            text[key] = text[key][:layers]
    if "max_window_layers" in text:
        text["max_window_layers"] = min(text["max_window_layers"], layers)
    if "vision_config" in values:
        _shrink_vision(values, values["vision_config"], layers)


def _shrink_vision(values: dict[str, Any], vision: dict[str, Any], layers: int) -> None:
    key = next(key for key in _DEPTHS if key in vision)
    depth = vision[key] = min(layers, vision[key])
    if vision.get("fullatt_block_indexes") is not None:  # the last block has full attention in every checkpoint
        vision["fullatt_block_indexes"] = sorted(
            {i for i in vision["fullatt_block_indexes"] if i < depth} | {depth - 1}
        )
    if vision.get("deepstack_visual_indexes") is not None:
        vision["deepstack_visual_indexes"] = list(range(min(depth, layers, len(vision["deepstack_visual_indexes"]))))
    layer = values.get("vision_feature_layer")
    if isinstance(layer, int):  # an index into depth + 1 hidden states
        values["vision_feature_layer"] = min(layer, depth) if layer >= 0 else max(layer, -(depth + 1))


def plain(value: Any) -> Any:
    """Configuration nodes as dicts and lists that a transformers config may keep and change."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [plain(inner) for inner in value]

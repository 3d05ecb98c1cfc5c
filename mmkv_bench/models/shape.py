"""`model.shape` of conf/model/*.yaml: a checkpoint's config.json as data, whole or with fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import model_facts
from mmkv_bench.families.registry import families

GENERATION = "generation_config"
"""Key of a shape that is no part of config.json: generation_config.json as data."""
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
    model_type = values.pop("model_type")
    if model_type in families():
        families()[model_type].register_classes()
    try:
        config = AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise UnsupportedError(
            f"model.shape.model_type={model_type} is no architecture of transformers: {error}"
        ) from error
    model_facts(config)
    return config


def values_of(shape: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    """The keys of config.json of a shape; arguments and ConfigError as of `config_of`."""
    values = plain({key: value for key, value in shape.items() if key != GENERATION})
    if values.get("model_type") is None:
        raise ConfigError("model.shape has no model_type; give the values of the checkpoint's config.json")
    if layers is not None:
        _shrink(values, layers)
    return values


def generation_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json of a shape."""
    return plain(shape.get(GENERATION) or {})


def plain(value: Any) -> Any:
    """Configuration nodes as dicts and lists that a transformers config or processor may keep and change."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [plain(inner) for inner in value]


def _shrink(values: dict[str, Any], layers: int) -> None:
    text = values.get("text_config", values)
    depth = text["num_hidden_layers"]
    if not 1 <= layers <= depth:
        raise ConfigError(
            f"model.layers={layers}: this model has {depth} layers; allowed: 1 to {depth}; give such a number"
        )
    text["num_hidden_layers"] = layers
    for key in _PER_LAYER:
        if text.get(key) is not None:
            text[key] = text[key][:layers]
    if "max_window_layers" in text:
        text["max_window_layers"] = min(text["max_window_layers"], layers)
    if "vision_config" in values and values["model_type"] in families():
        families()[values["model_type"]].shrink_vision(values, layers)

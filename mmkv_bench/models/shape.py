"""Shape and size of a model, read from its files: config.json (whole or with fewer layers), decoder, parameters."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.base import FULL, NO_STATES, Experts, Layer, States
from mmkv_bench.families.facts import model_facts, text_config
from mmkv_bench.families.registry import families

GENERATION = "generation_config"
"""Key of a shape that holds generation_config.json; all other keys are those of config.json."""
_PER_LAYER = ("layer_types", "mlp_layer_types")


def config_of(shape: Mapping[str, Any], layers: int | None = None) -> Any:
    """Build the transformers config of a shape.

    Args:
        shape: keys of config.json, including `model_type`.
        layers: number of layers of the text model, and upper limit for the vision tower's; widths and heads do not change.

    Raises:
        ConfigError: the shape has no model_type, or fewer layers than `layers`.
        UnsupportedError: the family or text model is not supported.
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
            f"model.shape.model_type={model_type} is not an architecture of transformers: {error}"
        ) from error
    model_facts(config)
    return config


def values_of(shape: Mapping[str, Any], layers: int | None = None) -> dict[str, Any]:
    """Return the keys of config.json in a shape. Arguments and ConfigError are those of `config_of`."""
    values = plain({key: value for key, value in shape.items() if key != GENERATION})
    if values.get("model_type") is None:
        raise ConfigError("model.shape has no model_type; give the values of the checkpoint's config.json")
    if layers is not None:
        _shrink(values, layers)
    return values


def plain(value: Any) -> Any:
    """Copy configuration nodes to dicts and lists, which a transformers config or processor may keep and change."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [plain(inner) for inner in value]


def _shrink(values: dict[str, Any], layers: int) -> None:
    text = values.get("text_config", values)
    depth = text["num_hidden_layers"]
    if not 1 <= layers <= depth:
        raise ConfigError(f"model.layers={layers}: this model has {depth} layers; allowed: 1 to {depth}")
    text["num_hidden_layers"] = layers
    for key in _PER_LAYER:
        if text.get(key) is not None:
            text[key] = text[key][:layers]
    if FULL not in (text.get("layer_types") or [FULL]):
        text["layer_types"][-1] = FULL  # so that there is something to compress
    if "max_window_layers" in text:
        text["max_window_layers"] = min(text["max_window_layers"], layers)
    known = families().get(values["model_type"])
    if known is None:
        return
    if backbone := known.text_model(text.get("model_type", values["model_type"])):
        backbone.shorten(text, depth - layers)
    if "vision_config" in values:
        known.shrink_vision(values, layers)


_NEEDED = ("hidden_size", "intermediate_size", "vocab_size")
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Decoder:
    """The shape of a text model with gated MLPs and attention; some layers may have linear attention.

    Attributes:
        layers, hidden, intermediate: number of blocks, width of the residual stream, width of the MLP.
        query_heads, kv_heads, head_dim: sizes of the attention.
        vocabulary: rows of the embedding table and of the head.
        tied: the head is the embedding table.
        qkv_bias: queries, keys and values have biases (Qwen2).
        qk_norm: queries and keys are normalised per head (Qwen3).
        gated, norms: see `families.base.TextModel`.
        states: the layers among `layers` that are not compressed.
        experts: the experts that replace each MLP, if any.
        vectors: see `families.base.TextModel.attention_vectors`.
        shapes, rows: see `families.base.TextModel.layers` and `rows`.
    """

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    norms: int = 2
    states: States = NO_STATES
    experts: Experts | None = None
    vectors: int = 0
    shapes: tuple[Layer, ...] = ()
    rows: int = 0

    @property
    def attention(self) -> int:
        """Number of layers with keys and values, including sliding-window layers. The other layers have linear attention."""
        return self.layers - self.states.linear

    @property
    def compressed(self) -> int:
        """Number of layers that are compressed."""
        return self.layers - self.states.layers

    @property
    def table(self) -> int:
        """Number of parameters of the embedding table. An untied head has as many."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> int:
        """Number of parameters in the matrices that one layer with attention applies to a token. Of experts, only the ones that a
        token is routed to count."""
        queries, entries = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = 3 * self.hidden * self.intermediate
        if self.experts is not None:
            mlp = self.experts.active * self.experts.matrices + self.experts.router
        return self.hidden * ((2 + self.gated) * queries + 2 * entries) + mlp

    @property
    def multiplied(self) -> int:
        """Parameters that all layers multiply with each token."""
        if self.shapes:
            return sum(one.count * one.matrices for one in self.shapes)
        linear = self.states.linear * (3 * self.hidden * self.intermediate + self.states.weights)
        return self.attention * self.matrices + linear

    @property
    def prefilled(self) -> int:
        """Parameters that the layers multiply with each token of a prompt; layers that read another layer's keys run for the
        last token only."""
        return self.multiplied - sum(one.count * one.matrices for one in self.shapes if one.reads)

    @property
    def blocks(self) -> int:
        """Parameters of all layers and of the last norm; of the experts only those that a token takes."""
        if self.shapes:
            return self.multiplied + sum(one.count * one.vectors for one in self.shapes) + self.hidden
        biases = (self.query_heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        norms = 2 * self.head_dim if self.qk_norm else 0
        residual = self.norms * self.layers * self.hidden
        taken = 0 if self.experts is None else self.experts.active * self.experts.biases
        return self.multiplied + self.attention * (biases + norms + self.vectors + taken) + residual + self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters of the text model. A tied embedding table counts once."""
        idle = 0
        if self.experts is not None:
            idle = (self.experts.count - self.experts.active) * (self.experts.matrices + self.experts.biases)
        return self.blocks + self.attention * idle + self.table * (1 if self.tied else 2) + self.rows

    @property
    def read(self) -> int:
        """Number of parameters that a decode step of one sequence reads. A batch may read more experts."""
        return self.blocks + self.table

    @property
    def entry(self) -> int:
        """Number of values in one token's keys and values, in one compressed layer."""
        return 2 * self.kv_heads * self.head_dim

    def queries(self, near: bool, reads: bool = False) -> int:
        """Count the numbers in a token's queries, of all layers that see a window (`near`) or the whole prompt, and that
        store keys and values or read those of another layer (`reads`)."""
        if self.shapes:
            return sum(one.count * one.queries for one in self.shapes if (one.near, one.reads) == (near, reads))
        return 0 if reads else (self.states.windows if near else self.compressed) * self.query_heads * self.head_dim

    def mean_entries(self, numbers: float) -> float:
        """Return the mean entries per KV head in layers with attention, if one sequence stores `numbers` in keys and values.
        Layers of several shapes are weighted by their queries, and windows are taken as full."""
        if not self.shapes:
            return numbers / (self.attention * self.entry)
        width = self.states.windows * self.states.entry
        near = min(numbers, self.states.window * width)
        entries = {True: near / max(width, 1), False: (numbers - near) / (self.compressed * self.entry)}
        queries = {kind: self.queries(kind) + self.queries(kind, True) for kind in entries}
        return sum(queries[kind] * entries[kind] for kind in entries) / sum(queries.values())


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model.

    Attributes:
        decoder: shape of the text model; None if the model's files do not state the whole shape.
        parameters: number of the whole model, vision tower included; None if unknown.
        source: origin of `parameters`: `files` (the stored weights), `stated` (the model's file in conf/model), `shape` (counted
            from a text model's shape), or `bound` (the stated number minus the layers left out, an upper bound).
        missing: one sentence about what is unknown, empty if nothing is.
    """

    decoder: Decoder | None = None
    parameters: int | None = None
    source: str = ""
    missing: str = ""


def decoder_of(config: Any) -> Decoder | None:
    """Return the text model's shape from a transformers config or a config.json; None if a number is missing."""
    text, facts = text_config(config), model_facts(config)
    backbone = facts.rules.text_model(text.model_type)
    assert backbone is not None, "model_facts refuses other ones"
    values: dict[str, Any] = {name: getattr(text, name, None) for name in _NEEDED}
    tied = getattr(config, "tie_word_embeddings", None)
    tied = getattr(text, "tie_word_embeddings", None) if tied is None else tied
    if tied is None or not all(isinstance(value, int) for value in values.values()):
        return None
    return Decoder(
        layers=facts.all_layers,
        hidden=values["hidden_size"],
        intermediate=values["intermediate_size"],
        query_heads=facts.num_query_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocabulary=values["vocab_size"],
        tied=bool(tied),
        qkv_bias=backbone.qkv_bias or bool(getattr(text, "attention_bias", False)),
        qk_norm=backbone.qk_norm,
        gated=backbone.gated,
        norms=backbone.norms,
        states=facts.states,
        experts=backbone.experts(text),
        vectors=backbone.attention_vectors(text),
        shapes=backbone.layers(text),
        rows=backbone.rows(text),
    )


def sizes_of(model: Mapping[str, Any], config: Any, full_config: Any = None, folder: str | Path | None = None) -> Sizes:
    """Return the sizes of a model that are known before the model is loaded.

    Args:
        model: the run's `model` node.
        config: the configuration stated by the model's files (`Source.outlined`); None if the files are missing.
        full_config: the configuration with all layers, if `model.layers` leaves some out.
        folder: the local folder of the weights, if there is one.
    """
    if config is None:
        return Sizes(missing=f"the files of model {model['name']} are not on this machine, so its shape is unknown")
    decoder = decoder_of(config)
    if decoder is None:
        return Sizes(
            missing=f"config.json of model {model['name']} does not state its widths, its vocabulary or whether its embeddings "
            "are tied, so its bytes are unknown before it is loaded"
        )
    stored = None if folder is None else stored_parameters(folder)
    if stored is not None:
        return Sizes(decoder, stored, "files")
    stated = (model.get("about") or {}).get("parameters")
    if stated and model.get("layers") is None:
        return Sizes(decoder, int(stated), "stated")
    if not model_facts(config).multimodal:
        return Sizes(decoder, decoder.parameters, "shape")
    complete = None if full_config is None else decoder_of(full_config)
    if stated and complete is not None:
        return Sizes(decoder, int(stated) - complete.parameters + decoder.parameters, "bound")
    missing = f"the number of parameters of {model['name']}'s vision tower is unknown until the model is loaded"
    return Sizes(decoder, missing=missing)


def stored_parameters(folder: str | Path) -> int | None:
    """Count the parameters in a folder's safetensors files, from the headers; None if there is no file or one is unreadable."""
    files = sorted(Path(folder).glob("*.safetensors"))
    count = 0
    try:
        for file in files:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > _LONGEST_HEADER:
                    return None
                header = json.loads(stream.read(length))
            count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        return count if files else None
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None

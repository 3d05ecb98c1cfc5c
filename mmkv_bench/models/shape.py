"""Shape of a model (config.json, perhaps with fewer layers) and number of parameters, without loading the model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.base import FULL, NO_STATES, Layer, States
from mmkv_bench.families.facts import model_facts, text_config
from mmkv_bench.families.registry import families

GENERATION = "generation_config"
"""Key of a shape whose value is generation_config.json; all other keys are those of config.json."""
_PER_LAYER = ("layer_types", "mlp_layer_types")


def config_of(shape: Mapping[str, Any], layers: int | None = None) -> Any:
    """Build the transformers config of a model from its shape.

    Args:
        shape: keys of config.json, including `model_type`.
        layers: number of layers of the text model, and largest number of layers of the vision tower; None: all layers.

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
    """Return the config.json keys of a shape; arguments and ConfigError as for `config_of`."""
    values = plain({key: value for key, value in shape.items() if key != GENERATION})
    if values.get("model_type") is None:
        raise ConfigError("model.shape has no model_type; give the values of the checkpoint's config.json")
    if layers is not None:
        _shrink(values, layers)
    return values


def plain(value: Any) -> Any:
    """Return configuration nodes copied to plain dicts and lists, which transformers may change."""
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
    family = families().get(values["model_type"])
    if family is None:
        return
    if backbone := family.text_model(text.get("model_type", values["model_type"])):
        backbone.shorten(text, depth - layers)
    if "vision_config" in values:
        family.shrink_vision(values, layers)


_NEEDED = ("hidden_size", "intermediate_size", "vocab_size")
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Decoder:
    """Shape of a text model with gated MLPs and attention; some layers may have linear attention.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        kv_heads, head_dim: number of KV heads of a compressed layer, and their width.
        vocabulary: rows of the embedding table and of the output head.
        tied: the output head is the embedding table.
        shapes: layers grouped by shape, see `families.base.TextModel.layers`.
        rows: parameters of further embedding tables, see `families.base.TextModel.rows`.
        states: the layers that are not compressed.
    """

    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    shapes: tuple[Layer, ...]
    states: States = NO_STATES
    rows: int = 0

    @property
    def compressed(self) -> int:
        return self.layers - self.states.layers

    @property
    def table(self) -> int:
        """Number of parameters of the embedding table; an output head that is not tied has as many."""
        return self.vocabulary * self.hidden

    @property
    def multiplied(self) -> int:
        """Number of matrix parameters of all layers that are active for one token, without experts that are not routed to."""
        return sum(one.count * one.matrices for one in self.shapes)

    @property
    def prefilled(self) -> int:
        """Like `multiplied`, without layers that read another layer's keys, because these run for the last token only."""
        return sum(one.count * one.matrices for one in self.shapes if not one.reads)

    @property
    def blocks(self) -> int:
        """Number of parameters of all layers and the last norm, without experts that are not routed to."""
        return self.multiplied + sum(one.count * one.vectors for one in self.shapes) + self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters of the text model; a tied embedding table counts once."""
        inactive_parameters = sum(one.count * one.idle for one in self.shapes)
        return self.blocks + inactive_parameters + self.table * (1 if self.tied else 2) + self.rows

    @property
    def read(self) -> int:
        """Number of parameters that one decode step reads for one sequence. A batch may read more experts."""
        return self.blocks + self.table

    @property
    def entry(self) -> int:
        """Number of values in one token's keys and values, in one compressed layer."""
        return 2 * self.kv_heads * self.head_dim

    def queries(self, near: bool, reads: bool = False) -> int:
        """Count the numbers in one token's queries, summed over layers of one kind.

        Args:
            near: the layers whose queries see a window (True) or the whole prompt (False).
            reads: the layers that read another layer's keys and values (True), or that store their own (False).
        """
        return sum(one.count * one.queries for one in self.shapes if (one.near, one.reads) == (near, reads))

    def mean_entries(self, numbers: float) -> float:
        """Return the mean number of entries per KV head over all layers with attention, weighted by the size of the queries.

        numbers: how many numbers one sequence stores as keys and values, sliding windows included. Windows count as full.
        """
        width = self.states.windows * (self.states.entry or self.entry)
        window_values = min(numbers, self.states.window * width)
        entries = {
            True: window_values / max(width, 1),
            False: (numbers - window_values) / (self.compressed * self.entry),
        }
        queries = {kind: self.queries(kind) + self.queries(kind, True) for kind in entries}
        return sum(queries[kind] * entries[kind] for kind in entries) / sum(queries.values())


@dataclass(frozen=True)
class Sizes:
    """Number of parameters of a model, as far as it is known before loading.

    Attributes:
        decoder: shape of the text model; None if the model's files do not state the whole shape.
        parameters: parameters of the whole model, vision tower included; None if unknown.
        source: where `parameters` comes from.
            `files`: the stored weights.
            `stated`: the model's file in conf/model.
            `shape`: counted from a text model's shape.
            `bound`: the stated number minus the layers left out, an upper bound.
        missing: a sentence that says what is unknown; "" if nothing is unknown.
    """

    decoder: Decoder | None = None
    parameters: int | None = None
    source: str = ""
    missing: str = ""


def decoder_of(config: Any) -> Decoder | None:
    """Return the shape of the text model from a transformers config or a config.json; None if a number is missing."""
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
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocabulary=values["vocab_size"],
        tied=bool(tied),
        shapes=backbone.layers(text, facts.states),
        states=facts.states,
        rows=backbone.rows(text),
    )


def sizes_of(model: Mapping[str, Any], config: Any, full_config: Any = None, folder: str | Path | None = None) -> Sizes:
    """Return the number of parameters of a model as far as it is known without loading the model.

    Args:
        model: the run's `model` node.
        config: the configuration stated by the model's files (`Source.outlined`); None if the files are missing.
        full_config: the configuration with all layers, if `model.layers` is set.
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
    """Count the parameters in a folder's safetensors files, from the headers; None without files or for unreadable files."""
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

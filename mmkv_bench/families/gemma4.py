"""Gemma 4 (text): sliding-window and full-attention layers, of which the last ones store nothing.

A layer that stores nothing (a reader) receives the current keys and values of the last storing layer of its kind: all of
them during the prefill, the remaining ones afterwards. So evicting in the storing layer evicts for its readers too. Only
the storing layer's queries decide what stays: it is scored before its readers run, and transformers runs the readers only
for a prompt's last tokens. Heads of full layers are wider than those of sliding layers, and may be fewer. Some full layers
have no value projection: their values are the normalised keys before rotation. Every layer adds its part of a table of
embeddings. Full layers rotate a quarter of a head's dimensions; cos and sin cover all, with angle 0 for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import FULL, READER, SLIDING, Family, Layer, States, TextModel


@dataclass(frozen=True)
class Gemma4Text(TextModel):
    """The text model of Gemma 4."""

    def check(self, text: Any) -> None:
        for name, why in (
            ("enable_moe_block", "its experts are not tested here"),
            ("use_bidirectional_attention", _ALL),
        ):
            if getattr(text, name, None) not in (None, False, "vision"):
                raise UnsupportedError(
                    f"Gemma 4 (text) with {name}={getattr(text, name)} is not supported, because {why}; allowed: null; choose "
                    "a checkpoint without this setting"
                )

    def states_all(self, text: Mapping[str, Any]) -> bool:
        return "per_layer_config" not in text and all(text.get(key) is not None for key in _STATED)

    def kinds(self, text: Any) -> list[str]:
        storing = text.num_hidden_layers - text.num_kv_shared_layers
        return [*text.layer_types[:storing], *[READER] * text.num_kv_shared_layers]

    def shorten(self, text: dict[str, Any], cut: int) -> None:
        if text.get("num_kv_shared_layers"):
            text["num_kv_shared_layers"] = max(0, text["num_kv_shared_layers"] - cut)
        if text.get("layer_types"):
            text["layer_types"][-1] = FULL  # transformers allows no other last layer

    def heads(self, text: Any) -> tuple[int, int]:
        return _heads(text, FULL)

    def states(self, text: Any, kinds: Sequence[str]) -> States:
        layer_states = super().states(text, kinds)
        kv_heads, width = _heads(text, SLIDING if SLIDING in text.layer_types else FULL)
        readers = [stated for kind, stated in zip(kinds, text.layer_types, strict=True) if kind == READER]
        return States(
            layer_states.windows,
            layer_states.window,
            entry=2 * kv_heads * width,
            readers=len(readers),
            full_readers=readers.count(FULL),
        )

    def layers(self, text: Any, states: States) -> tuple[Layer, ...]:
        storing = text.num_hidden_layers - text.num_kv_shared_layers
        pairs = Counter((kind, i >= storing) for i, kind in enumerate(text.layer_types))
        beside, hidden = text.hidden_size_per_layer_input, text.hidden_size
        layers = [_layer(text, kind, reads, count) for (kind, reads), count in pairs.items()]
        if beside:  # the projection of embeddings that gives each layer its part, and its norm
            layers.append(Layer(1, hidden * text.num_hidden_layers * beside, beside))
        return tuple(layers)

    def rows(self, text: Any) -> int:
        return int(text.vocab_size_per_layer_input * text.num_hidden_layers * text.hidden_size_per_layer_input)


def _layer(text: Any, kind: str, reads: bool, count: int) -> Layer:
    """Return `count` layers of one kind as a `Layer`.

    reads: the layers read another layer's keys and values (True), or store their own (False).
    """
    hidden, beside, (kv_heads, width) = text.hidden_size, text.hidden_size_per_layer_input, _heads(text, kind)
    queries = text.num_attention_heads * width
    projections = 0 if reads else 1 if kind == FULL and text.attention_k_eq_v else 2
    mlp = 3 * text.intermediate_size * (2 if reads and text.use_double_wide_mlp else 1)
    return Layer(
        count,
        matrices=hidden * (2 * queries + projections * kv_heads * width + mlp + 2 * beside),
        vectors=(4 + bool(beside)) * hidden + (1 if reads else 2) * width,
        queries=queries,
        near=kind == SLIDING,
        reads=reads,
    )


def _heads(text: Any, kind: str) -> tuple[int, int]:
    """Return the number of KV heads of a layer of this kind, and the width of a head."""
    layers = getattr(text, "per_layer_config", None)
    if layers is not None:  # a transformers config
        layer = layers[text.layer_types.index(kind)]
        return layer.num_key_value_heads, layer.head_dim
    if kind == SLIDING:
        return text.num_key_value_heads, text.head_dim
    full_layer_kv_heads = getattr(text, "num_global_key_value_heads", None) if text.attention_k_eq_v else None
    return full_layer_kv_heads or text.num_key_value_heads, text.global_head_dim


_STATED = ("layer_types", "sliding_window", "global_head_dim", "attention_k_eq_v", "num_kv_shared_layers",
           "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input")  # fmt: skip
_ALL = "every token then sees every other token, but scores are computed from causal attention"
FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma 4 (text)",
        (Gemma4Text("gemma4_text", qk_norm=True, head_dim_follows=False, beside=(SLIDING, READER), norms=4),),
        "Gemma4ForCausalLM",
    ),
)

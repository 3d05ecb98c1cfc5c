"""Gemma 4 (text): sliding-window and full-attention layers, of which the last ones store nothing.

A layer that stores nothing (a reader) receives the current keys and values of the last storing layer of its kind: all of
them during the prefill, the remaining ones afterwards. So evicting in the storing layer evicts for its readers too. Only
the storing layer's queries decide what stays: it is scored before its readers run, and transformers runs the readers only
for a prompt's last tokens. Heads of full layers are wider than those of sliding layers, and may be fewer. Some full layers
have no value projection: their values are the normalised keys before rotation. Every layer adds its part of a table of
embeddings. Full layers rotate a quarter of a head's dimensions; cos and sin cover all, with angle 0 for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import FULL, READER, SLIDING, Family, States, TextModel


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

    def heads(self, text: Any) -> tuple[int, int]:
        return _heads(text, FULL)

    def states(self, text: Any, kinds: Sequence[str]) -> States:
        made, (kv_heads, width) = super().states(text, kinds), _heads(text, SLIDING)
        readers = [stated for kind, stated in zip(kinds, text.layer_types, strict=True) if kind == READER]
        return States(
            made.windows,
            made.window,
            entry=2 * kv_heads * width,
            readers=len(readers),
            full_readers=readers.count(FULL),
        )


def _heads(text: Any, kind: str) -> tuple[int, int]:
    """Return the number of KV heads of a layer of this kind, and their width."""
    layer = text.per_layer_config[text.layer_types.index(kind)]
    return layer.num_key_value_heads, layer.head_dim


_ALL = "every token then sees every other token, but scores are computed from causal attention"
FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma 4 (text)",
        (
            Gemma4Text(
                "gemma4_text", qk_norm=True, head_dim_follows=False, beside=(SLIDING, READER), norms=4, uneven=True
            ),
        ),
        "Gemma4ForCausalLM",
    ),
)

"""Gemma 4 (text): sliding windows beside full attention, whose heads are wider and may be fewer; the last layers store nothing.

A layer that stores nothing is handed the keys and values that the last storing layer of its kind has at that moment: in the
prefill all of them, afterwards those that were left. So evicting in that layer evicts for its readers too. Only the storing
layer's own queries vote for what stays: its scores are made when it is done, before its readers run, and transformers runs these
for the last tokens of a prompt alone. Some full layers have no projection of values: normalised keys, before rotation, are their
values. A table of embeddings adds a part of its own to every layer. Full layers rotate a quarter of a head's dimensions; cos and
sin are handed for all, with angle 0 for the rest.
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
                    f"Gemma 4 (text) with {name}={getattr(text, name)} is not supported, because {why}; allowed: null; choose a "
                    "checkpoint without it"
                )

    def heads(self, text: Any) -> tuple[int, int]:
        return _heads(text, FULL)

    def states(self, text: Any, kinds: Sequence[str]) -> States:
        made, (kv_heads, width) = super().states(text, kinds), _heads(text, SLIDING)
        readers = [own for kind, own in zip(kinds, text.layer_types, strict=True) if kind == READER]
        return States(
            made.windows,
            made.window,
            entry=2 * kv_heads * width,
            readers=len(readers),
            full_readers=readers.count(FULL),
        )


def _heads(text: Any, kind: str) -> tuple[int, int]:
    """KV heads of a layer of one kind, and their width."""
    layer = text.per_layer_config[text.layer_types.index(kind)]
    return layer.num_key_value_heads, layer.head_dim


_ALL = "every token then sees every other, and scores are those of causal attention"
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

"""Gemma 3, arXiv 2503.19786: text models with five layers of a sliding window for each layer of full attention.

Each kind of layer has its own rotary embedding. Queries and keys are normalised per head, and every block is normalised
before and after. With pictures, full layers see a picture's block in both directions, so the family with pictures is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import SLIDING, Family, TextModel


@dataclass(frozen=True)
class Gemma3Text(TextModel):
    """The text model of Gemma 3."""

    def check(self, text: Any) -> None:
        changed = [
            name for name in ("use_bidirectional_attention", "attn_logit_softcapping") if getattr(text, name, None)
        ]
        if changed:
            raise UnsupportedError(
                f"Gemma 3 (text) with {changed[0]}={getattr(text, changed[0])} is not supported, because scores "
                "are computed from plain causal attention; allowed: null or false; choose a checkpoint without "
                "this setting"
            )


FAMILIES = (
    Family(
        "gemma3_text",
        "Gemma 3 (text)",
        (Gemma3Text("gemma3_text", qk_norm=True, head_dim_follows=False, beside=(SLIDING,), norms=4),),
        "Gemma3ForCausalLM",
    ),
)

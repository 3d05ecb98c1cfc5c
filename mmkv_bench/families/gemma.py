"""Gemma 3, arXiv 2503.19786, with and without pictures: five sliding-window layers for each full-attention layer.

Each kind of layer has its own rotary embedding. Queries and keys are normalised per head, and every block is normalised
before and after. A picture is resized to the tower's square. Its features are averaged over squares to 256 tokens, which
attend to each other in both directions in all layers (`compression/attended_prefix.py`). Pan and scan, which adds crops of a long
picture, is off: the processor does it only if a call asks for it, whatever the checkpoint's files say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import SLIDING, Box, Family, ImagePrompt, PixelLimits, Settings, Size, TextModel
from mmkv_bench.families.tiles import even, grid


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


class Gemma3(Family):
    """Rules of Gemma 3 with pictures."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        return int(settings["processor"]["image_seq_length"])

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        prompt.tower_edge()
        token_spans = even(math.isqrt(prompt.processor.image_seq_length))
        return [box for image in range(len(prompt.sizes)) for box in grid(image, token_spans, token_spans)]


_TEXT = Gemma3Text("gemma3_text", qk_norm=True, head_dim_follows=False, beside=(SLIDING,), norms=4)
FAMILIES = (
    Family("gemma3_text", "Gemma 3 (text)", (_TEXT,), "Gemma3ForCausalLM"),
    Gemma3(
        "gemma3",
        "Gemma 3",
        (_TEXT,),
        "Gemma3ForConditionalGeneration",
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        image_id_key="image_token_id",
        closing_id_key="eoi_token_id",
    ),
)

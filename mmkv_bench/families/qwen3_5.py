"""Qwen3.5, dense, with and without pictures: three layers of linear attention (gated delta rule) for each layer of full
attention.

Pictures and videos work as in Qwen3-VL. The query projection of a full layer is twice as wide: each head's query is
followed by its gate. A quarter of a head's dimensions is rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmkv_bench.families.base import LINEAR, Family, States, TextModel
from mmkv_bench.families.qwen_vl import SHARED, Qwen3VL


@dataclass(frozen=True)
class Qwen35Text(TextModel):
    """The text model of Qwen3.5."""

    def states(self, text: Any, kinds: Sequence[str]) -> States:
        heads, keys = text.linear_num_value_heads, text.linear_num_key_heads * text.linear_key_head_dim
        values, kernel = heads * text.linear_value_head_dim, text.linear_conv_kernel_dim
        channels = 2 * keys + values
        matrices = text.hidden_size * (channels + 2 * values + 2 * heads)
        return States(
            linear=kinds.count(LINEAR),
            conv=channels * kernel,
            recurrent=values * text.linear_key_head_dim,
            weights=matrices + channels * kernel + 2 * heads + text.linear_value_head_dim,
        )


_TEXT = Qwen35Text("qwen3_5_text", qk_norm=True, head_dim_follows=False, beside=(LINEAR,), gated=True)
FAMILIES = (
    Family("qwen3_5_text", "Qwen3.5 (text)", (_TEXT,), "Qwen3_5ForCausalLM"),
    Qwen3VL(
        "qwen3_5",
        "Qwen3.5",
        (_TEXT,),
        "Qwen3_5ForConditionalGeneration",
        "Qwen3VLProcessor",
        video_processor="Qwen3VLVideoProcessor",
        whole_video_limit=True,
        repeats_last_frame=True,
        **SHARED,
    ),
)

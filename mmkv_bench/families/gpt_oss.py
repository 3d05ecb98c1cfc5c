"""gpt-oss, arXiv 2508.10925: text models with a sliding window in every other layer, learned sinks and mixtures of
experts.

A sink is a learned score of a query head that joins the keys' scores in each softmax. It has no value vector, so its
share of the probability goes to no key. The classes of transformers have no `sdpa` attention. Rotations are YaRN's, and
the model computes cos and sin for half of a head's dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmkv_bench.families.base import SLIDING, Experts, Family, TextModel


@dataclass(frozen=True)
class GptOssText(TextModel):
    """The text model of gpt-oss."""

    def experts(self, text: Any) -> Experts:
        hidden, width, count = text.hidden_size, text.intermediate_size, text.num_local_experts
        return Experts(
            count=count,
            active=text.num_experts_per_tok,
            matrices=3 * hidden * width,
            biases=2 * width + hidden,
            router=count * (hidden + 1),
        )

    def attention_vectors(self, text: Any) -> int:
        return int(text.num_attention_heads + text.hidden_size)  # sinks, and the bias of the output


FAMILIES = (
    Family(
        "gpt_oss",
        "gpt-oss (text)",
        (GptOssText("gpt_oss", qkv_bias=True, head_dim_follows=False, beside=(SLIDING,), sinks=True),),
        "GptOssForCausalLM",
    ),
)

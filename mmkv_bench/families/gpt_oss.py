"""gpt-oss, arXiv 2508.10925: text models with a sliding window in every other layer, learned sinks and mixtures of
experts.

A sink is a learned score of a query head that joins the keys' scores in each softmax. It has no value vector, so its
share of the probability goes to no key. The classes of transformers have no `sdpa` attention. Rotations are YaRN's, and
the model computes cos and sin for half of a head's dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mmkv_bench.families.base import SLIDING, Family, Layer, States, TextModel


@dataclass(frozen=True)
class GptOssText(TextModel):
    """The text model of gpt-oss."""

    def layers(self, text: Any, states: States) -> tuple[Layer, ...]:
        """Return the layers, with router and experts in place of the MLP. The config's MLP size is the size of one expert."""
        hidden, width, count = text.hidden_size, text.intermediate_size, text.num_local_experts
        expert, biases, active = 3 * hidden * width, 2 * width + hidden, text.num_experts_per_tok
        later_expert_parameters = (active - 1) * expert + count * (hidden + 1)
        vectors = active * biases + text.num_attention_heads + hidden  # sinks, and the bias of the output
        inactive_parameters = (count - active) * (expert + biases)
        return tuple(
            replace(
                one,
                matrices=one.matrices + later_expert_parameters,
                vectors=one.vectors + vectors,
                idle=inactive_parameters,
            )
            for one in super().layers(text, states)
        )


FAMILIES = (
    Family(
        "gpt_oss",
        "gpt-oss (text)",
        (GptOssText("gpt_oss", qkv_bias=True, head_dim_follows=False, beside=(SLIDING,), sinks=True),),
        "GptOssForCausalLM",
    ),
)

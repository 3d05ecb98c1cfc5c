"""What the cells that share one prefill are answered with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import Prefilled
from mmkv_bench.generation.rules import DecodeRules


@dataclass
class Group:
    """One prefill of one prompt, shared by cells of one or several protocols.

    Attributes:
        prompt: the whole prompt; `prefilled.prompt` is as much of it as was prefilled.
        longest: tokens of the longest answer that is fed, a reference answer of the dataset's included.
    """

    model: nn.Module
    prompt: EncodedPrompt
    prefilled: Prefilled
    rules: DecodeRules
    tokenizer: Any
    meter: Meter
    longest: int
    timeout_s: float | None = None

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        layers = self.prefilled.cache.layers
        return layers[0].keys.shape[1] * len(layers)

    def reserve(self, protocol: str) -> int:
        """Slots of a reduced cache that is decoded from, or measured with a reference answer."""
        return slack(self.longest, self.prefilled.lengths[protocol].fed)

    def room(self, protocol: str) -> int:
        """Slots that the question and the answer take beyond what is kept, in a cell of this protocol by itself."""
        return self.prefilled.lengths[protocol].fed + self.rules.max_new_tokens - 1  # the answer's last is never fed

    def lead(self, protocol: str) -> tuple[Tensor, int]:
        """Prompt tokens that are fed before the answer, int64 `[1, fed]`, and how far behind the last prefilled token the
        first of them stands (or the answer's first, where nothing is fed)."""
        lengths = self.prefilled.lengths[protocol]
        return self.prompt.input_ids[:, lengths.candidates :], 1 - lengths.forgotten


def slack(longest: int, fed: int) -> int:
    """Slots to reserve for `fed` tokens of the prompt and an answer of at most `longest`."""
    return longest + fed + 1

"""How far one model's next-token distributions are from another's: naive float64 over Python numbers, one token at a time.

Written from the definitions, for tests; no code of mmkv_bench runs here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from tests import reference


def distribution(logits: Sequence[float]) -> list[float]:
    """softmax."""
    largest = max(logits)
    weights = [math.exp(value - largest) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def kl(full: Tensor, other: Tensor) -> float:
    """KL(full || other) in nats of two rows of logits [V]."""
    p, q = distribution(full.tolist()), distribution(other.tolist())
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def nll(logits: Tensor, token: int) -> float:
    """-log probability of a token under logits [V]."""
    return -math.log(distribution(logits.tolist())[token])


def first(logits: Tensor) -> int:
    """The token that is ranked first; among equals the lower id."""
    values = logits.tolist()
    return values.index(max(values))


class Forced(LogitsProcessor):
    """Makes stock greedy `generate()` write given tokens; the raw logits it reports are untouched."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.step = list(tokens), 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[self.step]] = 0.0
        self.step += 1
        return forced


def forcing(tokens: Sequence[int]) -> LogitsProcessorList:
    return LogitsProcessorList([Forced(tokens)])


def masked(
    model: nn.Module, inputs: dict[str, Tensor], tokens: Sequence[int], keep: reference.Keep | None = None, cut: int = 0
) -> Tensor:
    """Raw logits [n, V] that predict the n tokens when they are fed: stock `generate()` over a full cache, in which rows
    from `cut` on see only what is kept of the columns before it; everything without `keep`."""
    if keep is None:
        return reference.generate(model, inputs, len(tokens), logits_processor=forcing(tokens)).logits[:, 0]
    return reference.masked_generate(model, inputs, keep, cut, len(tokens), logits_processor=forcing(tokens)).logits[
        :, 0
    ]

"""Answers of the full cache drawn at a temperature: PrefixKV's reference for ROUGE-L. Nothing else is ever sampled."""

from __future__ import annotations

import hashlib
import random

import torch
from torch import Tensor

TEMPERATURE = 0.2
SEEDS = (0, 1)
"""Of the reference and of the second sample, which stands in the row of `full`. Part of what `reference_samples` means."""


class Sampler:
    """Draws tokens from softmax(logits / T) by inverting the distribution function, in float64 on the host.

    The stream of uniform numbers depends on the seed and the sample's identity alone: not on the batch, the order of
    samples, the other cells or the device. Neither top-k nor top-p is applied.

    Args:
        seed: one of `SEEDS`. identity: data set and sample id.
    """

    def __init__(self, seed: int, identity: str, temperature: float = TEMPERATURE):
        digest = hashlib.sha256(f"{seed}/{identity}".encode()).digest()
        self.stream, self.temperature = random.Random(int.from_bytes(digest, "big")), temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token, int64 `[1]`, from logits `[1, V]`."""
        weights = (logits[0].double().cpu() / self.temperature).softmax(-1).cumsum(-1)
        drawn = torch.tensor([self.stream.random()], dtype=torch.float64) * weights[-1]
        return torch.searchsorted(weights, drawn, right=True).clamp_max(len(weights) - 1).to(logits.device)

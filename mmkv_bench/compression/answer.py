"""Attention of an answer: how much the tokens fed after the prefill attend to each entry of the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.errors import UnsupportedError


class AnswerAttention:
    """Collected by a session while the full cache answers: per layer, the sum over all tokens fed after the prefill of
    their softmax over every entry that they see, prompt columns kept, mean over the g query heads of a KV head.

    What is fed depends on the protocol, and is what would read a compressed cache: the answer's tokens but the last,
    which is never fed; under `strict` the prompt's last token before them, under `query_agnostic` the question.

    Args:
        length: T, tokens of the prompt (of the context under `query_agnostic`).

    Attributes:
        steps: tokens fed; 0 for an answer of one token under `paper`.
    """

    def __init__(self, length: int):
        self.length, self.steps = length, 0
        self._mass: dict[int, Tensor] = {}

    def add(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Take in one forward. query `[1,Hq,n,D]` rotated, of the last n of S tokens; key `[1,Hkv,S,D]`, all of them.

        Raises:
            UnsupportedError: a batch of several sequences, whose answers end at different times.
        """
        if query.shape[0] != 1:
            raise UnsupportedError(f"answers are collected one by one; got a batch of {query.shape[0]}; use one prompt")
        rows = query.shape[2]
        mass = column_sums(query[0], key[0], scaling, key.shape[2] - rows)[:, : self.length].double()
        mass = mass / (query.shape[1] // key.shape[1])
        self._mass[layer] = self._mass[layer] + mass if layer in self._mass else mass
        self.steps += rows if layer == 0 else 0

    def mass(self, layer: int) -> Tensor | None:
        """Float32 `[Hkv,T]` of one layer; None when nothing was fed."""
        return self._mass[layer].to(torch.float32) if self.steps else None

"""Reducers that fail on purpose where the kept entries are gathered: for the batch that a fork decodes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv_bench.compression.reducers.evict import Evict


@dataclass(frozen=True)
class Poison(Evict):
    """Hands back values that are NaN, so that the logits are, or runs out of memory."""

    fault: str

    def reduce(self, key, value, index, types=None):
        if self.fault == "oom":
            raise torch.OutOfMemoryError("out of memory while gathering, on purpose")
        key, value = super().reduce(key, value, index)
        return key, torch.full_like(value, float("nan"))

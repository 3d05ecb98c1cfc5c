"""What one cell asks of a prompt and what came back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.protocols import DEFAULT, protocol
from mmkv_bench.store.response import Response


@dataclass(frozen=True)
class CellSpec:
    """One cell of a run: `budget=None` is the full cache; keep_indices: its row says which entries stay."""

    cell: str
    compressor: Compressor
    budget: Budget | None
    protocol: str = DEFAULT
    seed: int = 0
    keep_indices: bool = False

    def entries(self, length: int) -> int:
        """C for a prompt (or context) of `length` tokens; everything for `full`."""
        return length if self.budget is None else self.budget.entries_for(length)

    def evicts(self, length: int) -> bool:
        """The prompt is longer than the budget, so that entries have to be chosen."""
        return self.entries(length) < length

    def keeps_all(self, length: int) -> bool:
        """The prompt's full cache is used as it is."""
        return not self.evicts(length) and not self.compressor.quantises

    @property
    def tokens_from_full(self) -> int:
        """How many of an answer's tokens are the full cache's: the protocol's, or more of a policy that waits."""
        policy = self.compressor.decoding
        return max(protocol(self.protocol).from_prefill, 0 if policy is None else policy.tokens_from_full)


class ForkResult(Response):
    """One cell's answer to one prompt: what generation fills of its row.

    Attributes:
        selected: per layer int32 `[Hkv, m]` in host memory, the kept indices of which `kept_digest` is the digest, ascending
            behind padding of -1; no column of the row. None where nothing was counted.
    """

    selected: Sequence[Tensor] | None = None  # of the class: no field of the row's


def digest(kept: Sequence[Tensor]) -> str:
    """16 hex digits over the kept indices of all layers and heads; equal digests mean equal selections.

    Args:
        kept: per layer int64 `[Hkv, m]`, ascending, -1 = padding.
    """
    running = hashlib.sha256()
    for index in kept:
        layer = index.to("cpu", torch.int32).numpy()
        for head, padding in zip(layer, (layer < 0).sum(-1), strict=True):
            running.update(head[padding:].tobytes() + b"|")
    return running.hexdigest()[:16]

"""Batch of prompts while it is prefilled, as hooks, listeners and forks share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.observation import Observation


@dataclass
class PromptBatch:
    """One batch of prompts while it is being prefilled.

    Attributes:
        total: padded prompt length; pads: left padding of each row; cache: where the entries go.
        observations: layer -> one `Observation` per row, dropped as soon as the layer is done with.
        rotations: cos and sin of places behind each row, which are the same in every layer, while it is prefilled.
    """

    total: int
    pads: list[int]
    cache: CompressedCache
    n_layers: int
    token_types: Tensor | None = None
    observations: dict[int, list[Observation]] = field(default_factory=dict)
    rotations: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    complete: bool = False

    def length(self, row: int) -> int:
        return self.total - self.pads[row]

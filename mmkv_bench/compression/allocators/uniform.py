"""Equal numbers of entries for all layers and KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.parameter_checks import check_least


@dataclass(frozen=True)
class Uniform(Allocator):
    """An allocator that grants every KV head of every layer ``min(budget + excess - unused, n)`` of its n candidates.

    Args:
        excess: entries per KV head above the budget. 0 under the papers' rules. The KeyDiff in MM-ShiftKV's released
            code keeps 32 more.
        unused: entries per KV head by which the result stays below the budget; at least one entry is kept. 0 under
            the papers' rules. ElasticCache's released code evicts one entry too many.
    """

    excess: int = 0
    unused: int = 0

    def __post_init__(self) -> None:
        check_least(self, 0, "entries per KV head", "excess", "unused")

    @property
    def exceeds(self) -> bool:
        return self.excess > 0

    @property
    def falls_short(self) -> bool:
        return self.unused > 0

    @property
    def streams(self) -> bool:
        return self.scope == "layer" and not (self.excess or self.unused)

    @property
    def follows_prompt(self) -> bool:
        return False

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        cap = max(budget + self.excess - self.unused, min(budget, 1))
        return same_in_heads(scores, [min(cap, score.shape[1]) for score in scores])

"""A share of the budget for the most recent tokens, the rest for the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.parameter_checks import check_share
from mmkv_bench.compression.selectors.topk import TopK


@dataclass(frozen=True)
class RecentShare(TopK):
    """A selector that keeps the last ``floor(share * C)`` tokens and fills each cap with the highest scores.

    Args:
        sinks, recents, window: see ``TopK``; ``recents`` is the least that stays, here 0 by default.
        share: share of C [entries per KV head] that the most recent tokens get, in [0, 1]. The product is exact decimal
            arithmetic: 0.29 of 100 is 29.
    """

    recents: float = 0
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "share", "the budget")

    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        protected_tokens = super().protected(length, budget, types)
        protected_tokens[length - min(int(Decimal(str(self.share)) * budget), length) :] = True
        return protected_tokens

"""A reducer chosen by name, for methods whose merging is a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.feature_merge import FeatureMerge
from mmkv_bench.compression.reducers.position_merge import PositionMerge

METRICS = {"none": Evict(), "position": PositionMerge(), "feature": FeatureMerge()}


@dataclass(frozen=True)
class Merging(Reducer):
    """Merging of pruned entries by name (PrefixKV's table 12).

    Args:
        metric: what happens to pruned entries. "none": evicted (``Evict``); "position": averaged into the nearest kept
            entry (``PositionMerge``); "feature": averaged into the kept entry with the most similar key
            (``FeatureMerge``).
    """

    metric: Literal["none", "position", "feature"] = "none"

    def __post_init__(self) -> None:
        check_words(self)

    @property
    def merges(self) -> bool:
        return METRICS[self.metric].merges

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return METRICS[self.metric].reduce(key, value, index, types)

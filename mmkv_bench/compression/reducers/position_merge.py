"""Merging by position: every pruned entry is averaged into the nearest kept one. ElasticCache's buckets are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.reducers.cluster_mean import cluster_means, nearest_kept, pruned_places
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PositionMerge(Reducer):
    """ElasticCache (arXiv 2407.18121) and PrefixKV's ablation "Position" (arXiv 2412.03409, table 12).

    Pruned token m goes to the kept token ``n = argmin |m - n|`` of its head (equal distances: the lower n), and
    ``k_n = mean({k_n} and all k_m that went to it)``, values the same. That cuts the sequence at the midpoints between
    consecutive kept tokens (ElasticCache's anchors) and replaces each bucket by its mean, the anchor included: the two
    papers describe one operation. Keys are averaged as they are cached, with the rotation of their own positions; the
    merged entry counts at the kept token's position. Extra memory: one float32 copy of a layer's keys or values.

    Args:
        shift: pruned token m brings the content, and goes to the nearest neighbour, of token ``m - shift`` (0 or more
            tokens). 0 in the papers. ElasticCache's release forgets its offset of one protected first token: 1.
        closed: first and last kept candidates of each head that receive nothing [entries], 0 in the papers. In the
            release the protected first and last token do not: 1 (and the token that ``strict`` feeds again never does).

    Paper and code: with ``shift=1, closed=1`` the release's arithmetic; it crashes when only the two protected tokens
    are kept, here nothing is merged then.
    """

    shift: int = 0
    closed: int = 0
    merges = True

    def __post_init__(self) -> None:
        for name in ("shift", "closed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 0 or more tokens")

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        import torch

        place, pruned = pruned_places(index, key.shape[1])
        source = (place - self.shift).clamp_min(0)
        anchors = index[:, : max(0, index.shape[1] - self.closed)]
        anchors = anchors.masked_fill((anchors >= 0).cumsum(1) <= self.closed, -1)
        target = nearest_kept(anchors, source)
        merged = pruned & (place >= self.shift) & (target < anchors.shape[1])
        target = torch.where(merged, target, index.shape[1])
        return cluster_means(key, index, source, target), cluster_means(value, index, source, target)

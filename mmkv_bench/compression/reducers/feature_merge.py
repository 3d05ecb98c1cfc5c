"""Merging by similarity: every pruned entry is averaged into the kept entry with the most similar key."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.ordering import at_slots
from mmkv_bench.compression.numerics.tiles import row_blocks
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.reducers.position_merge import cluster_means, pruned_places


@dataclass(frozen=True)
class FeatureMerge(Reducer):
    """PrefixKV's ablation "Feature" (arXiv 2412.03409, table 12). No parameters.

    Pruned token m goes to the kept token n of its head with the largest cosine of ``k_m`` and ``k_n`` (equal cosines:
    the lower n; a zero key has cosine 0 with all), and ``k_n = mean({k_n} and all k_m assigned to n)``. Values follow
    their keys. Keys are compared and averaged as they are cached, rotated. Cosines are float32, by blocks of
    tokens, so that nothing of size T x T exists. The release has no merging code.
    """

    merges = True

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        slot_by_token, pruned = pruned_places(index, key.shape[1])
        target = self._most_similar(key, index).masked_fill_(~pruned, index.shape[1])
        return cluster_means(key, index, slot_by_token, target), cluster_means(value, index, slot_by_token, target)

    @staticmethod
    def _most_similar(key: Tensor, index: Tensor) -> Tensor:
        """Return the column of ``index [Hkv, m]`` with the key most similar to each token's: int64 ``[Hkv, n]``.

        It is m in heads that keep no token.
        """
        heads, slots = index.shape
        target = torch.full(key.shape[:2], slots, dtype=torch.int64, device=key.device)
        if slots == 0:
            return target
        direction = torch.nn.functional.normalize(key.float(), dim=-1)
        kept = at_slots(direction, index.clamp_min(0)).transpose(1, 2)
        padding = (index < 0).unsqueeze(1)
        for start, end in row_blocks(key.shape[1], heads * slots, key.device):
            cosine = torch.bmm(direction[:, start:end], kept).masked_fill_(padding, -2.0)
            target[:, start:end] = cosine.max(-1).indices  # of equal maxima the first
        return target.masked_fill_((index < 0).all(-1, keepdim=True), slots)

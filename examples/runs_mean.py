"""Mean of runs: an entry that stays also speaks for the evicted ones right before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.last_query import LastQueryScorer


class Scores(LastQueryScorer):
    """The attention of the prompt's last query."""


@dataclass(frozen=True)
class RunsMean(Evict):
    """A kept value becomes the mean of its run, the tokens from the one after the kept entry before it up to itself."""

    merges = True

    def reduce(self, key, value, index, types=None):
        kept_key, kept_value = super().reduce(key, value, index, types)
        heads, tokens, width = value.shape
        token = torch.arange(tokens, device=value.device).expand(heads, -1).contiguous()
        run = torch.searchsorted(
            index.contiguous(), token
        )  # the kept entry at or after each token; none after the last
        sums = kept_value.new_zeros(heads, index.shape[1] + 1, width, dtype=torch.float32)
        sums.scatter_add_(1, run.unsqueeze(-1).expand(-1, -1, width), value.float())
        counts = torch.zeros(sums.shape[:2], device=value.device).scatter_add_(
            1, run, torch.ones(run.shape, device=run.device)
        )
        means = (sums / counts.clamp_min(1).unsqueeze(-1))[:, :-1].to(value.dtype)
        return kept_key, means.masked_fill((index < 0).unsqueeze(-1), 0)

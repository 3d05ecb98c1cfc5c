"""H2O: keys that received most attention over the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class ColumnSumScorer(Scorer):
    """H2O (arXiv 2306.14048): heavy hitters are keys whose accumulated attention is large. No parameters.

    ``s_j = sum_i A[i, j]`` over all T causal queries, summed over the g query heads of a KV head, in float32. Key j
    gathers T - j terms, so early keys are favoured, as in the paper. The sums are streamed by blocks of query rows:
    extra memory is O(T). The selector ``RecentShare(0.5)`` keeps the last ``C // 2`` tokens, and heavy hitters get the
    other ``C - C // 2`` entries, as in the paper's equal split.

    Paper and code: the paper goes on accumulating while decoding and evicts one entry per new token
    (``method=h2o_decode``). The multimodal benchmarks that quote H2O use it one-shot at the end of the prefill
    (``method=h2o``). ElasticCache's release, which PrefixKV's tables build on, computes these scores too, but keeps one
    set of tokens for the whole model and uses a sorting permutation as ranks: ``method=h2o reading=released``, see the
    selector ``OneSet``.
    """

    needs = Needs(column_sums=True)

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        return obs.column_sums

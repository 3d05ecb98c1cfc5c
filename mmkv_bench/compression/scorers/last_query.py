"""LastAttn: the attention of the prompt's last query."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class LastQueryScorer(Scorer):
    """LastAttn, the starting point of MM-ShiftKV's ablation (table 5): ``S_t = a_t(q_last)``. No parameters.

    The attention of the prompt's last query over all T keys, averaged over the g query heads of a KV head, in float32
    and without pooling. It is the anchor term of MM-ShiftKV's score (equation 11) without any votes. The selector keeps
    the last token.

    Paper and code: the release has no class for this row. Its SnapKV with the default window of one query differs only
    by the pooling (``method=snapkv reading=released``).
    """

    needs = Needs(tail_queries=1)

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        return obs.last_attention()

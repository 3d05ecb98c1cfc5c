"""Oracle: the attention of the full cache's own answer, an upper bound that no real method can know."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class OracleScorer(Scorer):
    """The attention mass that the full cache's own answer, fed token by token (teacher-forced), pays to each entry.

    Per layer and KV head: softmax(scaling * q K^T) over every entry that a token sees, mean over the g query heads,
    summed over all tokens that `full` feeds after the prefill; prompt columns only. A control, not a method: it decodes
    with the full cache first. No paper.

    `full` runs under the same protocol. Under `paper` it feeds the answer's tokens but the last; under `strict` the
    prompt's last token before them; under `query_agnostic` the whole question before them. So exactly those queries
    count that would read the compressed cache.

    Fallback `oracle_no_answer_step`: an answer of one token under `paper` feeds nothing; the attention of the prompt's
    last query, which chose that token, is used instead.

    The control bounds selections by attention mass, not all selections: mass does not measure what an entry adds to an
    answer, and once entries are evicted later layers see other hidden states.
    """

    needs = Needs(tail_queries=1, answer=True)

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        return obs.last_attention()

    def with_answer(self, score: Tensor, mass: Tensor | None) -> Tensor:
        return score if mass is None else mass

    def answer_fallbacks(self, steps: int) -> tuple[str, ...]:
        return () if steps else ("oracle_no_answer_step",)

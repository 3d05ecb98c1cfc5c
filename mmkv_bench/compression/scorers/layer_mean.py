"""PrefixKV and ElasticCache: one importance per token and layer, shared by all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class LayerMeanScorer(Scorer):
    """PrefixKV (arXiv 2412.03409, section 3.2) and ElasticCache (arXiv 2407.18121): attention averaged over all heads.

    ``I_l[j] = (1 / Hq) * sum_h sum_i A_{l,h}[i, j]`` over all Hq query heads and all T causal queries of layer l. All
    KV heads of the layer get the same scores, and so keep the same tokens. Sums are float32, streamed by blocks of
    query rows: extra memory is O(T). Early tokens gather more terms, as in the papers. The selector keeps the first and
    the last token: ``TopK(sinks=1, recents=1)``.

    Args:
        ranking: "importance": the importance itself. "permutation", as ElasticCache's release: it sorts the importance
            of the tokens that are not protected ascending and keeps position i of this subsequence if the i-th entry of
            the sorting PERMUTATION is above a threshold, as if that entry were the rank of token i. These entries are
            the scores; as far as importance goes, the choice is random.
        sinks: the selector's sinks, first tokens that stay, at most C - 1 of them; the permutation leaves them out
            [tokens].

    Paper and code: PrefixKV's release ranks by the importance itself, in the half precision of the attention; here
    scores are float32. Not reproduced: ElasticCache's release crashes beyond 2048 tokens, and deletes the first token
    when only one token is to be evicted.
    """

    ranking: Literal["importance", "permutation"] = "importance"
    sinks: int = 1

    needs = Needs(column_sums=True)
    comparable = False

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "tokens", "sinks")

    @property
    def negative(self) -> bool:
        return self.ranking == "permutation"

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.ranking, self.sinks if self.ranking == "permutation" else None)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        sums = obs.column_sums
        importance = sums.sum(0) / (sums.shape[0] * obs.groups)
        if self.ranking == "permutation":
            importance = permutation_scores(importance, self.sinks)
        return importance.expand(sums.shape[0], -1).contiguous()


def permutation_scores(importance: Tensor, sinks: int) -> Tensor:
    """Return the scores of ElasticCache's release: the permutation that sorts tokens by importance, float32 ``[T]``.

    Only the tokens ``sinks .. T - 2`` are sorted, ascending. All others get -1.
    """
    scores = torch.full_like(importance, -1.0)
    last_token = importance.shape[0] - 1
    if sinks < last_token:
        scores[sinks:last_token] = importance[sinks:last_token].argsort(stable=True).to(scores.dtype)
    return scores

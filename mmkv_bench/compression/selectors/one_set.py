"""One set of tokens for every head of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.selectors.recent_share import RecentShare
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class OneSet(RecentShare):
    """A selector that averages the scores of all heads and layers and keeps the same tokens everywhere.

    The allocator must decide after the last layer, with equal caps (``UniformModel``).

    Args:
        sinks, recents, window, share: see ``RecentShare``; here the last token alone by default.
        ranking: `value` keeps the tokens of the highest mean. `permutation` is ElasticCache's released H2O: to evict f
            tokens, it sorts the unprotected tokens by score and keeps the j-th token if the j-th INDEX of the sorted
            order exceeds f. f + 1 tokens are evicted, except that f = 1 evicts the lowest score after the first token.
    """

    recents: float = 1
    share: float = 0.0
    ranking: Literal["value", "permutation"] = "permutation"

    @property
    def falls_short(self) -> bool:
        return self.ranking == "permutation"

    def select(
        self, scores: Tensor, caps: Tensor, protected: Tensor, order: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        rows = scores.shape[0]
        if int(caps.min()) != int(caps.max()):
            raise ConfigError(
                "one set of tokens for the whole model needs equal caps everywhere; use a uniform allocator"
            )
        mean = scores.double().mean(0, keepdim=True)
        evicted_count = scores.shape[1] - int(caps[0])
        if self.ranking == "value" or evicted_count <= 0:
            index = super().select(mean, caps[:1], protected, None, types)
        else:
            index = self._permuted(mean[0], protected, evicted_count)[None]
        return index.expand(rows, -1)

    @staticmethod
    def _permuted(score: Tensor, protected: Tensor, evict: int) -> Tensor:
        """Return the indices that ``ranking=permutation`` keeps, int64 ``[m]``, ascending.

        score: one score per token. evict: number of tokens to evict.
        """
        place = (~protected).nonzero()[:, 0]
        is_kept = protected.clone()
        if evict > 1:
            is_kept[place] = score[place].argsort(stable=True) > evict
        else:
            behind_first = place[place > 0] if len(place) > 1 else place
            is_kept[place] = True
            is_kept[behind_first[score[behind_first].argmin()]] = False
        return is_kept.nonzero()[:, 0]

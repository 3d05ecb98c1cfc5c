"""H2O while decoding: attention is accumulated, and for every new token the entry with the least of it is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.parameter_checks import check_share

if TYPE_CHECKING:
    from mmkv_bench.compression.cache import CompressedLayer


@dataclass(frozen=True)
class HeavyHitters(DecodePolicy):
    """H2O's greedy eviction (arXiv 2306.14048, section 4.1, algorithm 1), per layer and KV head.

    Every stored entry accumulates attention, starting from its score at the end of the prefill (with
    ``ColumnSumScorer`` the sum over all prompt queries). A query of the answer adds its softmax over the stored
    entries, summed over the g query heads. Then, while a head holds more entries than when the answer began, the entry
    with the least accumulated attention is evicted; of equal entries the later one. The newest ``floor(share * held)``
    entries, the new token's included, are never evicted.

    A head holds what its selection granted: C entries with uniform budgets. Under ``query_agnostic`` the question's Q
    entries come on top, and its queries add their attention, because no prefill has counted it. Under ``strict`` C - 1
    entries are selected and the last token, fed again, is the C-th. Its entry starts from its score in the prefill,
    which has counted its query already. A prompt within its budget keeps the full cache, also when its answer outgrows
    the budget.

    Args:
        share: share of the held entries that are recents, in [0, 1]; equal to the selector's share.

    Paper and code: of the authors' release, ``h2o_hf/utils_real_drop/modify_llama.py`` does what this class does.
    ``h2o_hf/utils_hh/modify_llama.py`` masks entries instead. Not reproduced: ElasticCache's release, which made the
    H2O rows of PrefixKV's tables, does not re-index its scores when the prompt is reduced, so it evicts other tokens
    than those that the scores were measured on. Its selection after the prefill is ``method=h2o reading=released``.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        check_share(self, "share", "the held entries")

    def recents(self, entries: int) -> int:
        """Return how many of a head's last entries are never evicted, exact in decimal: 0.29 of 100 is 29."""
        return int(Decimal(str(self.share)) * entries)

    def layer(self, start: Start) -> CompressedLayer:
        from mmkv_bench.compression.decoding.accumulating_layer import AccumulatingLayer

        return AccumulatingLayer.of(start, self.recents)

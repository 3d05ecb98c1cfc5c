"""A selector that keeps the observation window and all text, then the visual tokens with the highest scores."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.selectors.topk import TopK


@dataclass(frozen=True)
class TextFirst(TopK):
    """HybridKV's text-prior pruning (appendix A): the window and all text, then the best visual tokens.

    If a head's cap cannot hold all protected tokens, the last ones stay: first the window, then the most recent text.
    Without token types every token counts as text.

    Args:
        sinks, recents, window: see ``TopK``; by default no recents in addition to the window.
    """

    streams = False
    recents: float = 0
    window: int = 32

    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        protected_tokens = super().protected(length, budget, types)
        return protected_tokens.fill_(True) if types is None else protected_tokens | (types == 0)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        return ("no_visual_tokens",) if types is None or not bool((types > 0).any()) else ()

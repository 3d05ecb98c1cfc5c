"""Protected tokens first, then the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import effective_window
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.compression.selectors.base import Selector
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class TopK(Selector):
    """A selector that keeps sinks, recents or a window, and fills the rest of each cap with the highest scores.

    Args:
        sinks: first tokens of the prompt that stay [tokens]; ``min(sinks, C - 1)`` of them, so that a budget of one
            entry keeps the last token; the row then says ``protected_reduced``.
        recents: last tokens of the prompt that stay: a whole number [tokens], whatever the budget, or a share of C
            below 1, rounded down to tokens and at least one (0.25 of 64 is 16).
        window: size of an observation window that stays [tokens]. Unlike ``recents`` it follows the budget:
            ``min(window, max(1, C // 2), T)`` of the last tokens stay, the rows whose attention the scorer used.
    """

    sinks: int = 0
    recents: float = 1
    window: int = 0

    streams = True

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "tokens", "sinks", "recents", "window")
        if isinstance(self.recents, float) and not 0 < self.recents < 1:
            raise ConfigError(
                f"recents is {self.recents}; allowed: a whole number of tokens, or a share of the budget, 0 < recents < 1"
            )

    def _recents(self, budget: int) -> int:
        """Return the number of last tokens that are kept. A share of the budget is exact in decimal arithmetic."""
        return self.recents if isinstance(self.recents, int) else max(1, int(Decimal(str(self.recents)) * budget))

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return ``protected_reduced`` if sinks and recents together exceed C, so that not all of them are kept."""
        return ("protected_reduced",) if self.sinks + self._recents(budget) > budget else ()

    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        protected_tokens = torch.zeros(length, dtype=torch.bool, device=None if types is None else types.device)
        recents = self._recents(budget)
        if self.window:
            recents = max(recents, effective_window(self.window, budget, length))
        protected_tokens[: max(0, min(self.sinks, budget - 1))] = True
        protected_tokens[length - min(recents, length) :] = True
        return protected_tokens

    def select(
        self, scores: Tensor, caps: Tensor, protected: Tensor, order: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        heads, candidates = scores.shape
        device = scores.device
        caps = caps.clamp_max(candidates)
        width = int(caps.max())
        caps, protected = caps.to(device), protected.to(device)
        order = self.order(scores) if order is None else order
        # Rank every candidate: protected ones from the last backwards, then the others by score.
        count = protected.sum(-1, keepdim=True)
        from_last = protected.flip(-1).cumsum(-1).flip(-1)
        protected = protected.expand(heads, -1)
        unprotected_rank = (~protected).gather(-1, order).cumsum(-1) + count
        rank = torch.empty_like(order).scatter_(-1, order, unprotected_rank)
        rank = torch.where(protected, from_last, rank)
        is_kept = rank <= caps[:, None]
        # Write kept indices in ascending order to the right end of each row.
        slot = is_kept.cumsum(-1) - 1 + (width - caps[:, None])
        slot = torch.where(is_kept, slot, width)
        index = torch.full((heads, width + 1), -1, dtype=torch.int64, device=device)
        index.scatter_(-1, slot, torch.arange(candidates, device=device).expand(heads, -1))
        return index[:, :width]

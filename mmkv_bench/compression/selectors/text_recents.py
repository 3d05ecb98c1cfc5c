"""LOOK-M's and MEDA's selection: recents, then the highest scores, with the releases' rules for text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.exact import exact_decimal
from mmkv_bench.compression.selectors.recent_share import RecentShare
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class TextRecents(RecentShare):
    """LOOK-M (arXiv 2406.18139) and MEDA (arXiv 2502.17599, eq. 10): M recents, and N important ones of the others.

    Text outranks visual tokens because of the scorer (``TextPriorScorer``). By default exactly ``M + N`` entries stay,
    so text that does not fit is evicted, the lowest scores first (fallback ``text_over_budget``). LOOK-M's equation 8
    keeps all text besides the N important tokens, which contradicts the size that the paper states; this is
    ``rule=union``.

    Args:
        sinks, recents, window: see ``TopK``.
        share: share of the entries that the M recents get, in [0, 1], the rest for the highest scores; rounded down,
            exact decimal arithmetic. LOOK-M's alpha1 = alpha2 is 0.5, MEDA's 3:1 is 0.75.
        follow: what the share refers to: "budget": the prompt's C, the last token included; "cap": the layer's cap, for
            allocations that differ between layers; under ``strict`` this excludes the token that is fed again.
        rule: "strict": the M recents and the N highest scores of the others; "union", LOOK-M's equation 8 as printed:
            also ALL text, which exceeds the cap if text is not among these; "all_text", the releases': both parts are
            rounded down, ALL text outside of the recents is kept and counts towards N, so that ``max(N, text) + M``
            entries stay, which exceeds the cap when text exceeds N. "all_text" takes parts of the cap whatever
            ``follow`` says, and is allowed only for ``reading=released``.
        margin: when the M recents are fewer than the prompt's text tokens, take as many recents as there are text
            tokens and ``margin`` [tokens] more, of any kind, above the cap; -1 = never.
        text_first: the scorer ranks text first, so that text over the budget is reported.

    Paper and code: LOOK-M's release is ``all_text`` with halves, and sinks=4 in its class without text prior. MEDA's is
    ``all_text``, halves instead of 3:1, ``margin=100`` in its average class and 0 in its pivot class. The release stops
    with an error if the margin leaves fewer than N tokens to choose from, and does not reduce prompts without an image;
    here all of these tokens stay, and such prompts are reduced like H2O.
    """

    streams = False
    share: float = 0.5
    follow: Literal["budget", "cap"] = "budget"
    rule: Literal["strict", "union", "all_text"] = "strict"
    margin: int = -1
    text_first: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin < -1:
            raise ConfigError(f"margin is {self.margin}; allowed: 0 or more tokens, or -1 for none")

    @property
    def _by_cap(self) -> bool:
        return self.follow == "cap" or self.rule == "all_text" or self.margin >= 0

    @property
    def keeps_text(self) -> bool:
        """True if text is never evicted from a prompt with visual tokens."""
        return self.rule != "strict"

    @property
    def exceeds(self) -> bool:
        return self.rule != "strict" or self.margin >= 0

    @property
    def printed(self) -> bool:
        return self.rule == "union" and self.margin < 0

    @property
    def falls_short(self) -> bool:
        return self.rule == "all_text" or self.margin >= 0

    def protected(self, length: int, budget: int, types: Tensor | None) -> Tensor:
        selector_class = TopK if self._by_cap else RecentShare  # recents that follow a cap are known in `select` only
        return selector_class.protected(self, length, budget, types)

    def select(
        self, scores: Tensor, caps: Tensor, protected: Tensor, order: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        n, device = scores.shape[1], scores.device
        # a prompt of text alone needs no priority
        text = None if types is None or not bool((types > 0).any()) else (types == 0).to(device)
        if self.rule == "union" and text is not None:
            strict_index = replace(self, rule="strict").select(scores, caps, protected, order, types)
            is_kept = torch.zeros(len(scores), n + 1, dtype=torch.bool, device=device)
            is_kept = is_kept.scatter(1, strict_index.masked_fill(strict_index < 0, n), True)[:, :n] | text
            return super().select(scores, is_kept.sum(-1), is_kept, order)
        if not self._by_cap:
            return super().select(scores, caps, protected, order, types)
        recents, important = self._split_caps(caps.clamp_max(n).to(device))
        if self.margin >= 0 and text is not None:
            text_count = text.sum()
            recents = torch.where(recents < text_count, text_count + self.margin, recents).clamp_max(n)
        latest = torch.arange(n, device=device) >= n - recents[:, None]
        protected = protected.to(device) | latest
        if self.rule == "all_text" and text is not None:
            important = torch.maximum(important, (text & ~latest).sum(-1))
            protected = protected | text
        return super().select(scores, (important + recents).clamp_max(n), protected, order, types)

    def _split_caps(self, caps: Tensor) -> tuple[Tensor, Tensor]:
        """Return M (recent tokens) and N (important tokens) of every cap, int64 like ``caps``."""
        share = exact_decimal(self.share)
        recents = caps * share.numerator // share.denominator
        if self.rule != "all_text":
            return recents, caps - recents
        important_share = 1 - share
        return recents, caps * important_share.numerator // important_share.denominator

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return ``text_over_budget`` if a layer with the cap C has more text tokens before the M recents than N."""
        if not self.text_first or types is None or not bool((types > 0).any()):
            return ()
        recents = int(Decimal(str(self.share)) * budget)
        text_count = int((types[: max(0, length - recents)] == 0).sum())
        return ("text_over_budget",) if text_count > budget - recents else ()

"""AdaKV: the KV heads of a layer share one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.waterfill import largest_remainder
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.exact import exact_decimal
from mmkv_bench.compression.observation import effective_window
from mmkv_bench.compression.parameter_checks import check_least, check_share, check_words
from mmkv_bench.errors import UnsupportedError


@dataclass(frozen=True)
class HeadPool(Allocator):
    """AdaKV (arXiv 2407.11550): heads that spread their attention get more entries.

    With n candidates, C entries per KV head and w of them for the observation window, ``base = C - w``. Of all scores
    before the window in the KV heads of a layer, the ``Hkv * base`` largest are taken (equal scores: lower head, then
    lower token, first). n_h of these belong to head h. The head's cap is ``alpha * base + (1 - alpha) * n_h + w``. A
    layer holds exactly ``C * Hkv`` entries.

    Args:
        window: w [tokens], ``min(w, max(1, C // 2), n)`` of them, given to every head first; equal to the selector's
            window.
        alpha: share of ``base``, the budget without its window, that every head gets, in [0, 1].
        normalize: compare the heads' scores after multiplying those of each head by the fraction of their sum that its
            ``base`` largest hold. Needs scores of 0 or more.
        rounding: "remainder": largest remainder, exact totals; "nearest", under ``reading=released`` alone: each cap is
            rounded separately.

    Paper and code: ``reading=released`` is AdaKV's release as MM-ShiftKV's copy sets it: ``normalize=true``,
    ``alpha * base`` rounded down, and ``rounding=nearest``, so that a layer may hold a few entries more or fewer than
    its budget. AdaKV's own release pools scores by maximum over 7 tokens; here all methods with a window pool by
    average over 5.
    """

    window: int = 32
    alpha: float = 0.2
    normalize: bool = False
    rounding: Literal["remainder", "nearest"] = "remainder"

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "tokens", "window")
        check_share(self, "alpha", "the budget")

    @property
    def exceeds(self) -> bool:
        return self.rounding == "nearest"

    falls_short = exceeds

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        return [self._layer(score, budget) for score in scores]

    def _layer(self, score: Tensor, budget: int) -> Tensor:
        heads, candidates = score.shape
        if budget >= candidates:
            return torch.full((heads,), candidates, dtype=torch.int64)
        window = min(effective_window(self.window, budget, candidates), budget) if self.window else 0
        base = budget - window
        credit = self._credit(score[:, : candidates - window], base)
        alpha = exact_decimal(self.alpha)
        if self.rounding == "nearest":
            floor = int(alpha * base)
            shares = [min(round((1 - alpha) * n + floor), candidates - window) for n in credit]
        else:
            shares = largest_remainder([(1 - alpha) * n + alpha * base for n in credit])
        return torch.tensor(shares, dtype=torch.int64) + window

    def _credit(self, prefix: Tensor, base: int) -> list[int]:
        """Count, for each head, how many of the ``heads * base`` largest scores of ``prefix`` are the head's (n_h).

        prefix: scores before the window, ``[Hkv, n - w]``. base: mean entries per head without the window.
        """
        heads, columns = prefix.shape
        if self.normalize:
            if bool((prefix < 0).any()):
                raise UnsupportedError(
                    "normalize compares sums of scores, but this scorer gives negative scores; allowed: normalize=false"
                )
            total = prefix.sum(-1, keepdim=True)
            share = prefix.topk(base, -1).values.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
            prefix = prefix * share
        best_indices = prefix.flatten().sort(descending=True, stable=True).indices[: heads * base]
        return (best_indices // columns).bincount(minlength=heads).tolist()

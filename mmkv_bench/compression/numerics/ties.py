"""Scores whose ties a second number breaks, as one tensor of float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def tie_broken(score: Tensor, breaker: Tensor) -> Tensor:
    """Float64 like ``score`` that orders its entries by (score, breaker); entries equal in both stay equal.

    Selectors and allocators take one number per entry. Entries whose scores are equal are set apart by the smallest steps
    that float64 has, in the order of ``breaker``: an entry gives way only to those within reach of such steps (at most as
    many as there are entries, 1e-16 of the score each), every other score comes back bit for bit.

    Args:
        score: float64, 0 or more; breaker: of the same shape. The order is that of all entries together, whatever the shape.
    """
    import torch

    flat, second = score.flatten(), breaker.flatten()
    order = second.argsort(stable=True)
    order = order[flat[order].argsort(stable=True)]
    low, high = order[:-1], order[1:]
    differ = (flat[low] != flat[high]) | (second[low] != second[high])
    place = torch.nn.functional.pad(differ.cumsum(0), (1, 0))
    # Non-negative floats order like their bit patterns: no entry may come below the one before it, plus one if they differ.
    bits = flat[order].view(torch.int64)
    apart = torch.empty_like(bits)
    apart[order] = (bits - place).cummax(0).values + place
    return torch.where(score.isfinite(), apart.view(torch.float64).view_as(score), score)

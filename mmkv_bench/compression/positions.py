"""Position ids of text that follows a prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def following(last: Tensor, offset: int, count: int, rows: int) -> Tensor:
    """Return position ids `[..., rows, count]` of text tokens that begin `offset` positions after `last`."""
    positions = last + torch.arange(offset, offset + count, device=last.device)
    return positions.expand(*positions.shape[:-2], rows, count)


def last_positions(positions: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return the position after which text behind prompts of `length` tokens is numbered, `[..., B, 1]` (B = 1 if it is
    shared).

    positions: position ids that the text model received; None: the default ones.
    """
    if positions is None:
        return torch.full((1, 1), length - 1, device=device)
    last = positions[..., -1:].clone()
    if positions.ndim == 3:  # a text token that follows visual ones starts after their largest coordinate
        axes = slice(1, None) if positions.shape[0] == 4 else slice(None)
        last[axes] = positions[axes].amax((0, 2))[:, None]
    return last

"""Position ids of text that follows a prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def positions_after(last: Tensor, offset: int, count: int, rows: int) -> Tensor:
    """Return position ids `[..., rows, count]` of text tokens that begin `offset` positions after `last` `[..., 1|rows, 1]`."""
    positions = last + torch.arange(offset, offset + count, device=last.device)
    return positions.expand(*positions.shape[:-2], rows, count)


def last_positions(positions: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return the position after which the next text token of each prompt is numbered, `[..., B, 1]`.

    B is 1 if all prompts have the same positions. After text the position is the last token's. After a video it is the
    largest position of height and width, even if positions of time are larger, as in transformers (`get_rope_index` of
    Qwen2.5-VL).

    positions: position ids that the text model received; None: the default ones. length: tokens of the prompts.
    """
    if positions is None:
        return torch.full((1, 1), length - 1, device=device)
    last = positions[..., -1:].clone()
    if positions.ndim == 3:  # axes: time, height and width, in some families the place in the text before them
        last[-3:] = positions[-2:].amax((0, 2))[:, None]
    return last

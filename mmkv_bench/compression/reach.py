"""How far the tokens of a prompt see: to themselves, or in models that read a picture in both directions to its end.

A model's own mask says which of the two it is. Gemma 3 lets a picture's tokens see each other in all of its layers, Gemma 4 in
sliding layers only, which are not compressed. Every row then sees a prefix of the prompt, so that one number per row says all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmkv_bench.compression.states import FULL
from mmkv_bench.errors import UnsupportedError


def picture_ends(types: Tensor) -> Tensor:
    """Return the last token of the run of visual tokens that each token stands in, of text the token itself, int64 `[B, n]`.

    Args:
        types: int `[B, n]`, 0 text, above 0 visual.
    """
    visual, places = types > 0, torch.arange(types.shape[1], device=types.device)
    goes_on = torch.nn.functional.pad(visual[:, :-1] & visual[:, 1:], (0, 1))
    return places.masked_fill(goes_on, types.shape[1]).flip(1).cummin(1).values.flip(1)


def check_start(types: Tensor | None, start: int) -> None:
    """Refuse a chunk of a prompt that begins inside a picture whose tokens see each other. Raises UnsupportedError.

    Args:
        types: as of `picture_ends`, of all tokens so far; None: unknown. start: tokens before the chunk.
    """
    if types is not None and start and bool((types[:, start - 1 : start + 1] > 0).all(1).any()):
        raise UnsupportedError(
            "a chunk of the prompt begins inside a picture, whose tokens attend to each other in both directions; feed a picture "
            "in one chunk"
        )


def reach_of(mask: object, types: Tensor | None, pads: Sequence[int]) -> Tensor | None:
    """Return the last of all S tokens so far that each of the n newest sees, int64 `[B, n]` on the CPU; None: itself.

    Args:
        mask: of the text model's forward, `[B|1, 1, n, S]`, bool or added to scores, or several by kind of layer, of which that
            of full attention counts; None and masks of padding alone are causal.
        types: int `[B, S or more]`, 0 text, above 0 visual; None: unknown. pads: left padding of each row.

    Raises:
        UnsupportedError: a query sees later tokens other than those of its own picture, as in PaliGemma's prompts.
    """
    mask = mask.get(FULL) if isinstance(mask, dict) else mask
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2] < 2:
        return None
    visible = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    new, seen = visible.shape[1:]
    start = seen - new
    if not bool(visible.triu(1 + start).any()):
        return None
    known = torch.zeros(1, seen) if types is None else types[:, :seen]
    slots, ends = torch.arange(seen, device=visible.device), start + picture_ends(known[:, start:].to(visible.device))
    padding = torch.tensor(pads, device=visible.device)[:, None, None]
    wanted = (slots <= ends[:, :, None]) & (slots >= padding)
    if not bool(((visible == wanted) | (slots[start:, None] < padding)).all()):
        raise UnsupportedError(
            "this model's prompt tokens attend to later ones (a bidirectional mask), and scores are computed from causal "
            "attention; only models with a causal prompt, or one whose pictures alone see themselves to their ends, can be "
            "compressed"
        )
    return ends.cpu()

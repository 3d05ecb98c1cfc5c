"""The last token that each token of a prompt attends to: itself, or the last token of its picture.

The tokens of a picture attend to each other in all layers of Gemma 3, but only in the sliding layers of Gemma 4, which are
not compressed. A token always attends to a prefix of the prompt, so one number per token is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmkv_bench.compression.states import FULL
from mmkv_bench.errors import UnsupportedError


def picture_ends(types: Tensor) -> Tensor:
    """Return the index of the last token of each token's run of visual tokens, int64 `[B, n]`; for text, the token's own index.

    types: int `[B, n]`, 0 text, above 0 visual.
    """
    visual, token_indices = types > 0, torch.arange(types.shape[1], device=types.device)
    continues = torch.nn.functional.pad(visual[:, :-1] & visual[:, 1:], (0, 1))
    return token_indices.masked_fill(continues, types.shape[1]).flip(1).cummin(1).values.flip(1)


def check_start(types: Tensor | None, start: int) -> None:
    """Raise UnsupportedError if a chunk of a prompt begins inside a picture whose tokens attend to each other.

    Args:
        types: types of all tokens so far, as in `picture_ends`; None: unknown.
        start: number of tokens before the chunk.
    """
    if types is not None and start and bool((types[:, start - 1 : start + 1] > 0).all(1).any()):
        raise UnsupportedError(
            "a chunk of the prompt begins inside a picture, but the picture's tokens attend to each other in both "
            "directions; feed each picture in one chunk"
        )


def reach_of(mask: object, types: Tensor | None, pads: Sequence[int]) -> Tensor | None:
    """Return the last token that each of the n newest tokens attends to, int64 `[B, n]` on the CPU.

    None: every token attends only to tokens up to itself.

    Args:
        mask: the text model's attention mask, `[B|1, 1, n, S]` for S tokens so far, bool or added to scores; or a mapping
            from kinds of layers to masks, of which the mask of full attention is used. None, or a mask that hides only
            padding, means causal attention.
        types: int `[B, S or more]`, 0 text, above 0 visual; None: unknown.
        pads: left padding of each row.

    Raises:
        UnsupportedError: a token attends to later tokens outside its picture, as in PaliGemma's prompts.
    """
    mask = mask.get(FULL) if isinstance(mask, dict) else mask
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2] < 2:
        return None
    visible = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    new_tokens, seen = visible.shape[1:]
    start = seen - new_tokens
    if not bool(visible.triu(1 + start).any()):
        return None
    known_types = torch.zeros(1, seen) if types is None else types[:, :seen]
    slots = torch.arange(seen, device=visible.device)
    ends = start + picture_ends(known_types[:, start:].to(visible.device))
    padding = torch.tensor(pads, device=visible.device)[:, None, None]
    expected_mask = (slots <= ends[:, :, None]) & (slots >= padding)
    if not bool(((visible == expected_mask) | (slots[start:, None] < padding)).all()):
        raise UnsupportedError(
            "this model's prompt tokens attend to later tokens (a bidirectional mask), but scores are computed from causal "
            "attention; allowed: a causal mask, or one that is bidirectional only inside a picture; choose another model"
        )
    return ends.cpu()

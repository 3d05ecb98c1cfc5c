"""An observation window's attention with every step in the model's own half precision, as releases compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.compression.numerics.tiles import row_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def is_half(dtype: torch.dtype) -> bool:
    """Return True for bfloat16 and float16, whose numbers have fewer digits than scores."""
    return dtype.is_floating_point and dtype.itemsize == 2


def half_window(tail: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Attention of the last w queries to every key, ``[Hq, T]`` in the dtype of the keys: mean over the w rows.

    Products, their scaling, probabilities and means are rounded to that dtype; the softmax, causal inside the window, is
    float32. Heads are treated some at a time (``tiles.py``).

    Args:
        tail: ``[Hq, w, D]``, the prompt's last w queries (w <= T); key: ``[Hkv, T, D]``; scaling: factor of the products.
    """
    import torch

    heads, total, _ = key.shape
    rows, group = tail.shape[1], tail.shape[0] // heads
    future = torch.ones(rows, rows, dtype=torch.bool, device=key.device).triu_(1)
    parts = []
    for first, last in row_blocks(heads, group * rows * total, key.device):
        keys = key[first:last].repeat_interleave(group, 0)
        # Divided, as releases do: the factor's inverse gives another last digit now and then.
        logits = torch.bmm(tail[first * group : last * group], keys.transpose(1, 2)) / (1 / scaling)
        logits[..., total - rows :].masked_fill_(future, float("-inf"))
        parts.append(logits.softmax(-1, dtype=torch.float32).to(key.dtype).mean(1))
    return torch.cat(parts)

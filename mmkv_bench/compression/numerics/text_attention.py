"""Concentration of each head's attention when text looks at the prompt, streamed by blocks of query rows.

Shapes: Hq query heads, Hkv KV heads, g = Hq / Hkv, T tokens, D head dimension. Query head h reads KV head h // g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmkv_bench.compression.numerics.attention import exponentials
from mmkv_bench.compression.numerics.tiles import row_blocks


def top_mass(query: Tensor, key: Tensor, scaling: float, rows: Sequence[int], top: int) -> Tensor:
    """Share of its attention that a row gives to its ``top`` keys, on average: HybridKV's sparsity score (equation 3).

    Row i attends to keys 0..i (softmax in float32); the ``top`` largest probabilities are added up. Rows that see at
    most ``top`` keys give exactly 1. Nothing larger than one tile (``tiles.py``) exists at any time.

    Args:
        query: ``[Hq, T, D]``, rotated. key: ``[Hkv, T, D]``, rotated. Any floating dtype.
        scaling: factor of the scores.
        rows: ascending indices of the query rows that count, at least one.
        top: keys per row, 1 or more.

    Returns:
        float64 ``[Hkv]`` on the CPU: mean over the rows and over the g query heads of a KV head, in (0, 1].
    """
    heads, dim = key.shape[0], key.shape[2]
    group = query.shape[0] // heads
    keys = key.float().transpose(1, 2)
    total = torch.zeros(heads, dtype=torch.float64, device=key.device)
    for start, end in row_blocks(len(rows), query.shape[0] * (rows[-1] + 1), key.device):
        block, n = rows[start:end], end - start
        first, seen = block[0], block[-1] + 1
        position = torch.tensor(block, device=key.device)
        states = query[:, position].float().mul_(scaling).view(heads, group * n, dim)
        scores = torch.bmm(states, keys[:, :, :seen])
        future = torch.arange(first, seen, device=key.device) > position[:, None]
        scores.view(heads, group, n, seen)[..., first:].masked_fill_(future, float("-inf"))
        weight = exponentials(scores, masked=True)
        best = scores.topk(min(top, seen), sorted=False).values
        mass = (best.sum(-1) * weight).double().view(heads, group, n)
        total += mass.masked_fill_(position < top, 1.0).sum((1, 2))  # not 1 up to rounding: heads would not tie
    return (total / (len(rows) * group)).cpu()

"""Attention mass per key, streamed by blocks of query rows.

A block of complete rows holds its own softmax denominators, so one pass is enough and nothing larger than a tile
(``tiles.py``) exists at any time. Inputs may be float16 or bfloat16: scores, softmax and sums are float32.

Shapes: Hq query heads, Hkv KV heads, g = Hq / Hkv, w or n query rows, T or S keys, D head dimension. Query head h reads
KV head h // g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv_bench.compression.statistics.tiles import row_blocks


def attention_rows(query: Tensor, key: Tensor, scaling: float, first: int | None) -> Tensor:
    """Softmax over the keys, ``[Hkv, g, r, S]`` float32.

    Args:
        query: ``[Hkv, g, r, D]``.
        key: ``[Hkv, S, D]`` float32.
        first: logical position of row 0; row i sees keys 0..first+i. None when every row sees every key.
    """
    heads, group, rows, dim = query.shape
    q = query.float().mul(scaling).reshape(heads, group * rows, dim)
    scores = torch.bmm(q, key.transpose(1, 2)).view(heads, group, rows, -1)
    if first is not None and first + 1 < scores.shape[-1]:
        position = torch.arange(first, first + rows, device=query.device)
        hidden = torch.arange(scores.shape[-1], device=query.device) > position[:, None]
        scores.masked_fill_(hidden, float("-inf"))
    # In place: torch.softmax would hold a second tile.
    scores -= scores.amax(-1, keepdim=True)
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores


def column_sums(query: Tensor, key: Tensor, scaling: float, offset: int = 0) -> Tensor:
    """Causal attention column sums ``[Hkv, S]`` float32, summed over rows and over the g query heads of a KV head.

    Args:
        query: ``[Hq, n, D]``, rows at positions ``offset .. offset + n - 1``.
        key: ``[Hkv, S, D]`` with ``S = offset + n``.
        scaling: factor of the scores.
        offset: tokens before this chunk; add the sums of all chunks to get those of the whole prompt.
    """
    heads, total = key.shape[:2]
    query = query.view(heads, -1, *query.shape[1:])
    keys = key.float()
    sums = torch.zeros(heads, total, dtype=torch.float32, device=key.device)
    rows = query.shape[2]
    for start, end in row_blocks(rows, heads * query.shape[1] * total, key.device):
        seen = offset + end
        sums[:, :seen] += attention_rows(query[:, :, start:end], keys[:, :seen], scaling, offset + start).sum((1, 2))
    return sums


def window_mass(tail: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Attention of the last w queries to every key, ``[Hkv, T]`` float32: mean over the w rows and the g query heads.

    The softmax runs over all T keys, causal inside the window, as in SnapKV (arXiv 2404.14469, section 4).

    Args:
        tail: ``[Hq, w, D]``, the prompt's last w queries (w <= T).
        key: ``[Hkv, T, D]``.
        scaling: factor of the scores.
    """
    rows = tail.shape[1]
    return column_sums(tail, key, scaling, key.shape[1] - rows) / (rows * (tail.shape[0] // key.shape[0]))

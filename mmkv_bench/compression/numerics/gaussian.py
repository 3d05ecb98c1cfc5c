"""Expected attention of a Gaussian query, in closed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.compression.numerics.rotary import rotate
from mmkv_bench.compression.numerics.tiles import row_blocks

if TYPE_CHECKING:
    from torch import Tensor


def average_rotation(mean: Tensor, covariance: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``[H, D]`` and covariance ``[H, D, D]`` of a query after the average of m rotations ``cos, sin [m, D]``."""
    cos, sin = cos.to(mean.dtype).mean(0), sin.to(mean.dtype).mean(0)
    rows = rotate(covariance, cos, sin).transpose(-1, -2)  # rotate(x) = x R^T for rows x, and R C R^T takes it twice
    return rotate(mean, cos, sin), rotate(rows, cos, sin).transpose(-1, -2)


def expected_logits(key: Tensor, mean: Tensor, covariance: Tensor | None, scaling: float) -> Tensor:
    """log E[exp(scaling * q.k)] for q ~ N(mean, covariance), float32 ``[Hkv, g, T]``.

    Args:
        key: ``[Hkv, T, D]``.
        mean: ``[Hq, D]``.
        covariance: ``[Hq, D, D]``; None leaves the second-order term out.
        scaling: factor of the scores, usually ``D ** -0.5``.
    """
    import torch

    heads, total, dim = key.shape
    keys = key.float()
    mean = mean.float().view(heads, -1, dim)
    logits = torch.bmm(mean, keys.transpose(1, 2)).mul_(scaling)
    if covariance is not None:
        group = mean.shape[1]
        covariance = covariance.float().view(heads, group, dim, dim)
        for first, last in row_blocks(heads, total * group * dim, key.device):  # whole heads as far as they fit a tile
            for start, end in row_blocks(total, (last - first) * group * dim, key.device):
                block = keys[first:last, None, start:end]
                second = (block @ covariance[first:last]).mul_(block).sum(-1)
                logits[first:last, :, start:end] += second.mul_(scaling * scaling / 2)
    return logits

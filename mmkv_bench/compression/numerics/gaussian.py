"""Expected attention of a Gaussian query, in closed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.compression.numerics.rotary import rotate
from mmkv_bench.compression.numerics.tiles import row_blocks

if TYPE_CHECKING:
    from torch import Tensor


def average_rotation(mean: Tensor, covariance: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``[H, D]`` and covariance ``[H, D, D]`` of a query after the average of m rotations ``cos, sin [m, D]``."""
    import torch

    cos, sin = cos.to(mean.dtype).mean(0), sin.to(mean.dtype).mean(0)
    # rotate(x) = x R^T for rows x, so rotating the rows of the identity gives R^T.
    turned = rotate(torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device), cos, sin)
    return mean @ turned, turned.T @ covariance @ turned


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
        for start, end in row_blocks(total, heads * group * dim, key.device):
            block = keys[:, None, start:end]
            logits[..., start:end] += (block @ covariance).mul_(block).sum(-1).mul_(scaling * scaling / 2)
    return logits

"""The first weights of tower and connector: places as waves, and heads that look at neighbouring patches.

The class is the stock vision transformer. Its position embedding starts as sines and cosines in 64 of the channels, and query and
key of each head as a rotation of these waves, so that a head begins by reading the patch one or two places beside its own, as a
convolution does. A tower of random weights must find its neighbours among 1,024 places first, which takes most of a short
training. Everything is trained from there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

WAVES = 8
"""Frequencies of an axis; a head of 32 channels takes sine and cosine of both axes."""
OFFSETS = (
    ((-1, 0), (1, 0), (-2, 0), (2, 0), (0, -1), (0, 1)),
    ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)),
    ((-1, 0), (1, 0), (-2, 0), (2, 0), (0, -2), (0, 2)),
    ((-1, 0), (1, 0), (-3, 0), (3, 0), (0, -1), (0, 1)),
)
"""By layer and head: columns and rows from a patch to the one that its head looks at."""


def prepare_tower(model: Any, seed: int, sharpness: float = 2.2) -> None:
    """Set the first weights of tower and connector in place; the same seed gives the same weights.

    Args:
        sharpness: larger looks at one patch, smaller at the patches around it, too.
    """
    generator = torch.Generator().manual_seed(seed)
    tower, config = model.model.vision_model, model.config.vision_config
    side, width = config.image_size // config.patch_size, config.hidden_size
    waves = 2 * math.pi / torch.tensor([2.7 * 1.5**step for step in range(WAVES)])
    with torch.no_grad():
        for name, value in tower.named_parameters():
            if value.dim() >= 2:
                fan = value[0].numel()
                value.copy_(torch.randn(value.shape, generator=generator) * (0.7 / math.sqrt(fan)))
            elif name.endswith("bias"):
                value.zero_()
        places = torch.arange(side).float()
        table = tower.embeddings.position_embedding.weight
        table.copy_(torch.randn(table.shape, generator=generator) * 0.01)
        table[:, : 4 * WAVES] = _waves(places, waves)
        tower.embeddings.patch_embedding.weight.mul_(1.4)
        tower.embeddings.patch_embedding.weight[: 4 * WAVES] *= 0.1  # these channels say where, the others what
        for layer, offsets in zip(tower.encoder.layers, OFFSETS, strict=True):
            attention, size = layer.self_attn, width // config.num_attention_heads
            for weight in (attention.q_proj.weight, attention.k_proj.weight):
                weight.mul_(0.2)
            for head, (right, down) in enumerate(offsets):
                rows = slice(head * size, head * size + 4 * WAVES)
                scale = sharpness * math.sqrt(math.sqrt(size) / WAVES)
                attention.k_proj.weight[rows, : 4 * WAVES] += scale * torch.eye(4 * WAVES)
                attention.q_proj.weight[rows, : 4 * WAVES] += scale * _turn(waves, right, down)
            attention.out_proj.weight[: 4 * WAVES] *= 0.1
            layer.mlp.fc2.weight[: 4 * WAVES] *= 0.1
        value = model.model.connector.modality_projection.proj.weight
        value.copy_(torch.randn(value.shape, generator=generator) * (0.1 / math.sqrt(width)))


def _waves(places: torch.Tensor, waves: torch.Tensor) -> torch.Tensor:
    """Return (places ** 2, 4 * WAVES): cosines and sines of columns, then of rows, row after row of places."""
    angle = places[:, None] * waves
    one = torch.cat([angle.cos(), angle.sin()], 1)
    count = len(places)
    return torch.cat([one[None].expand(count, -1, -1), one[:, None].expand(-1, count, -1)], 2).reshape(count**2, -1)


def _turn(waves: torch.Tensor, right: int, down: int) -> torch.Tensor:
    """Return the matrix (4 * WAVES, 4 * WAVES) that moves the waves of a place to those of the place beside it."""
    matrix = torch.zeros(4 * WAVES, 4 * WAVES)
    for start, step in ((0, right), (2 * WAVES, down)):
        cos, sin = torch.diag((waves * step).cos()), torch.diag((waves * step).sin())
        a, b = slice(start, start + WAVES), slice(start + WAVES, start + 2 * WAVES)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, -sin, sin, cos
    return matrix

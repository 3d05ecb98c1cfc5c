"""The vision tower of the embedded model, all attention windows in one batch.

The library's forward calls attention once per window. Here every window has the same 64 patches (pages whose sides
are multiples of 4 cells) and no layer attends beyond its window, so one batched call does the same arithmetic from
the module's own weights. Rotary positions count from the window's corner: attention depends on differences only.
A test holds this equal to the library's forward.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CELL = 28
WINDOW = 4  # cells per window side
PATCHES = 4 * WINDOW * WINDOW  # 2 x 2 patches per cell
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)  # of the Qwen2-VL image processor
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def to_windows(page: np.ndarray) -> torch.Tensor:
    """A page uint8 (28 * rows, 28 * columns, 3) -> normalised patches float32 (windows, 64, 588).

    Windows in reading order, cells in reading order within a window, four patches per cell, each (channel, y, x).
    Raises ValueError when a side is not a multiple of 4 cells.
    """
    import torch

    height, width = page.shape[0] / (CELL * WINDOW), page.shape[1] / (CELL * WINDOW)
    if not (height.is_integer() and width.is_integer()):
        raise ValueError(f"a page of {page.shape[:2]} px is not made of windows of {CELL * WINDOW} px")
    split = page.reshape(int(height), WINDOW, 2, 14, int(width), WINDOW, 2, 14, 3)
    patches = split.transpose(0, 4, 1, 5, 2, 6, 8, 3, 7).reshape(-1, PATCHES, 3, 196).astype(np.float32)
    normalised = (patches / 255 - MEAN[:, None]) / STD[:, None]
    return torch.from_numpy(normalised.reshape(-1, PATCHES, 588))


def to_cells(outputs: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Window outputs (windows, 16, hidden) of one or more pages -> (cells, hidden), each page in reading order."""
    hidden = outputs.shape[-1]
    grid = outputs.reshape(-1, rows // WINDOW, columns // WINDOW, WINDOW, WINDOW, hidden)
    return grid.transpose(2, 3).reshape(-1, hidden)


@lru_cache(maxsize=1)
def _patch_positions() -> torch.Tensor:
    """(64, 2): row and column of each patch in its window, in the order of to_windows."""
    import torch

    cell = torch.arange(WINDOW)
    row, column, down, right = torch.meshgrid(cell, cell, torch.arange(2), torch.arange(2), indexing="ij")
    return torch.stack([2 * row + down, 2 * column + right], -1).reshape(PATCHES, 2)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    import torch

    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def encode(visual: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Merged visual tokens of a batch of windows: (windows, 64, 588) -> (windows, 16, hidden of the language model).

    `visual` is the model's own vision tower (every block window-local). Differentiable.
    """
    import torch

    if visual.fullatt_block_indexes:
        raise ValueError(f"blocks {list(visual.fullatt_block_indexes)} attend beyond their window; expected none")
    count = windows.shape[0]
    # An image is repeated as both frames of a temporal patch, so the two frames' weights add up.
    weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
    states = torch.nn.functional.linear(windows, weight)
    angles = (_patch_positions()[:, :, None] * visual.rotary_pos_emb.inv_freq).flatten(1)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    for block in visual.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(states)).reshape(count, PATCHES, 3, attention.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, scale=attention.scaling
        )
        states = states + attention.proj(mixed.transpose(1, 2).reshape(count, PATCHES, -1))
        states = states + block.mlp(block.norm2(states))
    return visual.merger(states.reshape(count * PATCHES, -1)).reshape(count, PATCHES // 4, -1)

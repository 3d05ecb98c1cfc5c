"""How many attention rows are held at once: the only memory the streaming statistics need beyond their result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmkv_bench import devices

if TYPE_CHECKING:
    import torch

ROWS = 64  # of a head in one product: with fewer, as many heads at once leave it short of arithmetic


def head_blocks(heads: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges ``(start, end)`` over ``heads`` such that ``ROWS`` rows of ``width`` values in each of them fit one tile."""
    return row_blocks(heads, ROWS * width, device)


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges ``(start, end)`` over ``rows`` such that a block of ``width`` values per row fits one tile.

    A block has at least one row, so extra memory is the larger of one tile and one row: O(T).
    """
    step = max(1, devices.at(device).tile // max(1, width))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)

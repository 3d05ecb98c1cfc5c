"""Sizes of the blocks of attention rows in memory; streaming statistics need no other memory beyond their result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mmkv_bench import devices
from mmkv_bench.compression.lazy_torch import torch

_ENDS = (0, -2, -1)
_ends_only: ContextVar[bool] = ContextVar("ends_only", default=False)
ROWS = 128  # of a head in one matrix multiplication; fewer rows would be limited by memory speed


def head_blocks(heads: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield ranges ``(start, end)`` over ``heads`` of which ``ROWS`` rows of ``width`` values per head fit one tile."""
    return row_blocks(heads, ROWS * width, device)


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield ranges ``(start, end)`` over ``rows``, such that a block of ``width`` values per row fits one tile.

    A block has at least one row, so extra memory is the larger of one tile and one row: O(T).
    """
    step = max(1, devices.at(device).tile // max(1, width))
    starts = range(0, rows, step)
    for start in starts if len(starts) <= len(_ENDS) or not _ends_only.get() else (starts[place] for place in _ENDS):
        yield start, min(start + step, rows)


@contextmanager
def ends_only() -> Iterator[None]:
    """Inside the block, skip all blocks of a pass but the first one and the last two.

    The pass's memory is then measured without its result. This is enough because blocks differ only in the number of
    keys that they see, and only the last block may be shorter.
    """
    token = _ends_only.set(True)
    try:
        yield
    finally:
        _ends_only.reset(token)

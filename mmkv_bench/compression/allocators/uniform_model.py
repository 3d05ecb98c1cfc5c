"""Uniform budgets that are granted only after the last layer."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.allocators.uniform import Uniform


@dataclass(frozen=True)
class UniformModel(Uniform):
    """``Uniform`` for selectors that need the scores of all layers at once (``OneSet``): no memory is freed earlier.

    Args:
        excess: see ``Uniform``.
    """

    scope = "model"

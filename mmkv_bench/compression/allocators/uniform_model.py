"""Uniform budgets that are granted only after the last layer."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.allocators.uniform import Uniform


@dataclass(frozen=True)
class UniformModel(Uniform):
    """``Uniform`` after the last layer, for selectors that need the scores of all layers at once (``OneSet``).

    No memory is freed earlier.

    Args:
        excess, unused: see ``Uniform``.
    """

    scope = "model"

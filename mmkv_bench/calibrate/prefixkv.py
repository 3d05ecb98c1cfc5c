"""PrefixKV's global prefix configuration (arXiv 2412.03409, section 3.3), estimated offline from a few prompts.

For every budget of a grid and every sample, Algorithm 1 finds the kept share ``R_l`` of each layer; shares are averaged
over the samples and scaled once more, so that they add up to the budget. Prefill only: no answer is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.observing import read_layers
from mmkv_bench.calibrate.samples import Sample, encoded
from mmkv_bench.compression.numerics.prefix import prefix_curves, prefix_ratios, scaled
from mmkv_bench.compression.observation import Needs, Observation

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.models.load import LoadedModel

GRID = tuple(Decimal(i) / 100 for i in range(1, 101))
"""Fractions kept: 0.01, 0.02, ..., 1."""


def importance(obs: Observation) -> Tensor:
    """Attention that each token gathers in one layer, summed over all queries and query heads: float64 ``[T]``."""
    return obs.column_sums.double().sum(0).cpu()


def measure(loaded: LoadedModel, sample: Sample, settings: Mapping[str, Any]) -> list[list[float]]:
    """``R_l`` of one sample for every budget of `GRID`: rows of one share per layer."""
    prompt = encoded(loaded, sample)
    curves = prefix_curves(read_layers(loaded.model, prompt.inputs, prompt.types, Needs(column_sums=True), importance))
    return [prefix_ratios(curves, float(rho), settings["delta"], settings["steps"])[0] for rho in GRID]


def summarise(found: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The artefact's data from `measure` of every sample.

    Returns:
        ``{"layers": L, "grid": [rho, ...], "ratios": [[R_l] per rho], "std": [[...] per rho]}``: shares of the prompt
        that each layer keeps, mean over samples, adding up to ``L * rho`` but for rounding; population standard
        deviation over samples before the scaling (the paper's table 7).
    """
    ratios, std = [], []
    for rho, samples in zip(GRID, zip(*found, strict=True), strict=True):
        columns = list(zip(*samples, strict=True))
        means = [Fraction(fmean(column)) for column in columns]
        ratios.append([float(share) for share in scaled(means, len(columns) * Fraction(rho))])
        std.append([pstdev(column) for column in columns])
    return {"layers": len(found[0][0]), "grid": [float(rho) for rho in GRID], "ratios": ratios, "std": std}

"""Measurements that calibrate methods; per method one function measures a sample, another summarises all samples.

SparseMM's measurement is in `sparsemm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmkv_bench.calibrate import sparsemm
from mmkv_bench.calibrate.layers import read_layers, with_answer
from mmkv_bench.calibrate.samples import PromptSample, answer_ids, encoded
from mmkv_bench.compression.allocators.hybrid import Hybrid
from mmkv_bench.compression.numerics.prefix import prefix_curves, prefix_ratios, scaled
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.errors import CalibrationError

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

GRID = tuple(Decimal(i) / 100 for i in range(1, 101))
"""Fractions of PrefixKV's profile: 0.01, 0.02, ..., 1."""
QUANTILES = tuple(i / 20 for i in range(21))


# ---------------------------------------------------------------- PrefixKV
def prefix_shares(loaded: LoadedModel, sample: PromptSample, settings: Mapping[str, Any]) -> list[list[float]]:
    """Measure the fraction ``R_l`` of one sample's entries that PrefixKV keeps in each layer (arXiv 2412.03409, section
    3.3, algorithm 1). Only a prefill is needed, no answer.

    Returns:
        For every budget of `GRID` a list of one fraction per layer.
    """
    prompt = encoded(loaded, sample)

    def importance(obs: Observation) -> Tensor:  # attention that a token gathers, float64 [T]
        return obs.column_sums.double().sum(0).cpu()

    curves = prefix_curves(read_layers(loaded.model, prompt.inputs, prompt.types, Needs(column_sums=True), importance))
    return [prefix_ratios(curves, float(rho), settings["delta"], settings["steps"])[0] for rho in GRID]


def prefix_profile(measured: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """Summarise `prefix_shares` of all samples: shares are averaged, then scaled to add up to the budget.

    Returns:
        ``{"layers": L, "grid": [rho, ...], "ratios": [[R_l] per rho], "std": [[...] per rho]}``. ratios: share of the prompt
        that a layer keeps, mean over samples; they add up to ``L * rho`` except for rounding. std: population standard
        deviation over samples before the scaling (the paper's table 7).
    """
    ratios, std = [], []
    for rho, samples in zip(GRID, zip(*measured, strict=True), strict=True):
        columns = list(zip(*samples, strict=True))
        means = [Fraction(fmean(column)) for column in columns]
        ratios.append([float(share) for share in scaled(means, len(columns) * Fraction(rho))])
        std.append([pstdev(column) for column in columns])
    return {"layers": len(measured[0][0]), "grid": [float(rho) for rho in GRID], "ratios": ratios, "std": std}


# ---------------------------------------------------------------- HybridKV
def head_sparsity(loaded: LoadedModel, sample: PromptSample, settings: Mapping[str, Any]) -> list[list[float]]:
    """Measure HybridKV's sparsity score S* in one sample (arXiv 2604.05887, equation 3), by the code of the method: per
    layer one number per KV head."""
    if not 0 <= settings["quantile"] <= 1:
        raise CalibrationError(f"--quantile {settings['quantile']} is not a quantile; allowed: 0 to 1")
    prompt = encoded(loaded, sample)
    method = Hybrid(top=settings["top"])
    return read_layers(
        loaded.model, prompt.inputs, prompt.types, method.needs, lambda obs: method.summary(obs, 1, 0).tolist()
    )


def sparsity_threshold(
    measured: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int
) -> dict[str, Any]:
    """Summarise `head_sparsity` of all samples.

    The paper calls its threshold "quantile-based, tuned on a validation set" and states one number, 0.9, for its models.
    Other models concentrate attention differently, so the threshold here is a quantile of the measured model's S*.

    Returns:
        ``{"theta": ..., "sparsity": [[mean S* per KV head] per layer], "std": [[...]], "quantiles": {"0.05": ...}}``:
        theta is the requested quantile (linear interpolation) of all S* of all heads and samples; std is the population
        standard deviation over the samples.
    """
    heads = [[list(values) for values in zip(*layer, strict=True)] for layer in zip(*measured, strict=True)]
    values = [value for sample in measured for layer in sample for value in layer]
    return {
        "theta": float(np.quantile(values, settings["quantile"])),
        "sparsity": [[fmean(values) for values in layer] for layer in heads],
        "std": [[pstdev(values) for values in layer] for layer in heads],
        "quantiles": {f"{q:.2f}": float(np.quantile(values, q)) for q in QUANTILES},
    }


# ---------------------------------------------------------------- MM-ShiftKV
def moments(states: Tensor, length: int) -> tuple[list[float], float, float]:
    """Return the elementwise mean ``[E]`` of the prompt, and the population standard deviations of prompt and answer.

    states: ``[T + n, E]``, n >= 1; the first `length` tokens are the prompt. Each deviation is taken over all values of all
    its tokens together.
    """
    prompt, answer = states[:length].double(), states[length:].double()
    return prompt.mean(0).tolist(), float(prompt.std(correction=0)), float(answer.std(correction=0))


def state_moments(
    loaded: LoadedModel, sample: PromptSample, settings: Mapping[str, Any]
) -> list[tuple[list[float], float, float]]:
    """Measure `moments` of the input of every layer's query projection, for a prompt followed by its reference answer."""
    prompt = encoded(loaded, sample)
    answer = torch.tensor(answer_ids(loaded, sample), device=loaded.device)
    longer, types = with_answer(prompt.inputs, prompt.types, answer)
    return read_layers(loaded.model, longer, types, Needs(states=True), lambda obs: moments(obs.states, prompt.length))


def state_statistics(measured: Sequence[list[tuple]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """Summarise `state_moments` of all samples, for MM-ShiftKV's ablations (the method needs no calibration).

    Returns:
        ``mean``: E floats per layer (table 11, global mean centring). ``gamma``: per layer the ratio of the states' spread
        while the answer is decoded to the spread over the prompt (table 10, layer-wise expansion; figure 1a).
        ``std_prompt`` and ``std_answer``: the mean standard deviations whose ratio is gamma.
    """
    layers = [list(zip(*layer, strict=True)) for layer in zip(*measured, strict=True)]
    prompt, answer = [fmean(std) for _, std, _ in layers], [fmean(std) for _, _, std in layers]
    return {
        "mean": [[fmean(values) for values in zip(*means, strict=True)] for means, _, _ in layers],
        "gamma": [a / p for a, p in zip(answer, prompt, strict=True)],
        "std_prompt": prompt,
        "std_answer": answer,
    }


class CalibrationMeasurement(NamedTuple):
    """The functions that calibrate one method: `measure` one sample, `summarise` all samples; `options`: names of the
    command's options that affect the data."""

    measure: Callable[[LoadedModel, Any, Mapping[str, Any]], Any]
    summarise: Callable[[Sequence[Any], Mapping[str, Any], int], dict[str, Any]]
    options: tuple[str, ...] = ()


MEASUREMENTS = {
    "hybridkv": CalibrationMeasurement(head_sparsity, sparsity_threshold, ("top", "quantile")),
    "mmshift": CalibrationMeasurement(state_moments, state_statistics),
    "prefixkv": CalibrationMeasurement(prefix_shares, prefix_profile, ("delta", "steps")),
    "sparsemm": CalibrationMeasurement(sparsemm.measure, sparsemm.summarise),
}

"""HybridKV's head sparsity on sample prompts (arXiv 2604.05887, equation 3), and a threshold between its two kinds of head.

The paper calls its threshold "quantile-based, tuned on a validation set" and states one number, 0.9, for its models.
Other models concentrate their attention differently: this measures the distribution of S* and takes one of its quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.observing import read_layers
from mmkv_bench.calibrate.samples import Sample, encoded
from mmkv_bench.compression.allocators.hybrid import Hybrid
from mmkv_bench.errors import CalibrationError

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

QUANTILES = tuple(i / 20 for i in range(21))


def measure(loaded: LoadedModel, sample: Sample, settings: Mapping[str, Any]) -> list[list[float]]:
    """S* of one sample, as the method itself computes it: rows of one number per KV head."""
    if not 0 <= settings["quantile"] <= 1:
        raise CalibrationError(f"--quantile {settings['quantile']} is no quantile; allowed: 0 to 1")
    prompt = encoded(loaded, sample)
    method = Hybrid(top=settings["top"])
    return read_layers(
        loaded.model, prompt.inputs, prompt.types, method.needs, lambda obs: method.summary(obs, 1, 0).tolist()
    )


def summarise(found: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The artefact's data from `measure` of every sample.

    Returns:
        ``{"theta": ..., "sparsity": [[mean S* per KV head] per layer], "std": [[...]], "quantiles": {"0.05": ...}}``:
        theta is the asked quantile (linear interpolation) of all S* of all heads and samples; std is the population
        standard deviation over the samples.
    """
    heads = [[list(values) for values in zip(*layer, strict=True)] for layer in zip(*found, strict=True)]
    values = sorted(value for sample in found for layer in sample for value in layer)
    return {
        "theta": quantile(values, settings["quantile"]),
        "sparsity": [[fmean(values) for values in layer] for layer in heads],
        "std": [[pstdev(values) for values in layer] for layer in heads],
        "quantiles": {f"{q:.2f}": quantile(values, q) for q in QUANTILES},
    }


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, linearly between the two nearest."""
    at = q * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)

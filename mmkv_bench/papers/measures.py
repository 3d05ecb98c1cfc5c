"""Metrics of the papers' tables that are no scores: where their numbers come from, and what a printed one may differ by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmkv_bench.config.schema import reference_dir
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.papers.address import MEAN, is_group

GIB = 2.0**30


@dataclass(frozen=True)
class Reduction:
    """A column of `responses`, as its mean over samples, or of timed passes, as its median over repeats; divided by `per`.
    `layers`: how the entries kept per layer and head become a number."""

    column: str
    per: float = 1.0
    layers: str = ""


REDUCTIONS = {
    "prompt_tokens": Reduction("prompt_tokens"),
    "kv_gib": Reduction("bytes_device", GIB),
    "tpot_ms": Reduction("tpot_s", 1e-3),
    "layer_ratio_std": Reduction("kept", layers="std"),
    "layer_ratio_mad": Reduction("kept", layers="mad"),
}
"""Metric -> what of the answers it reduces."""

PASSES = {
    "ttft_s": Reduction("ttft_s"),
    "total_s": Reduction("total_s"),
    "tpot_ms": Reduction("tpot_s", 1e-3),
    "tokens_per_s": Reduction("tokens_s"),
    "selection_ms": Reduction("select_s", 1e-3),
    "kv_gib": Reduction("bytes_held", GIB),
    "peak_gb": Reduction("peak_total", 1e9),
}
"""Metric -> what of a timed pass it reduces (`scenario=efficiency`, columns of `tables.passes`)."""

DIAGNOSTICS = {
    "hidden_mean_std": ("mean and spread of hidden states per layer, prompt against answer", "hidden_states"),
    "hidden_histogram": ("histogram of hidden states per layer", "histogram"),
    "attention_coverage": ("share of decode attention on kept entries", "coverage"),
    "outlier_hit_rate": ("share of outlier channels that the proxies reach", "outlier_hits"),
    "lorenz": ("cumulative priority per layer, and its Gini coefficient", "lorenz"),
    "layer_ratio": ("kept ratio per layer", "prefix_search"),
    "feature_error": ("mean absolute error of hidden states per layer", "feature_error"),
    "search_steps": ("steps of the online search", "prefix_search"),
    "power_spectrum": ("energy of keys and values over frequency", "power_spectrum"),
    "focus_counts": ("how often tokens are among the top of the decode attention", "focus"),
    "cumulative_attention": ("attention over the top share of tokens, per head", "cumulative_attention"),
    "cross_modal_entropy": ("entropy of the attention between text and image, per layer", "entropy"),
}
"""Metric -> what an analysis shows, and the name under which `mmkv-bench diagnose` measures it ("": nothing does). Their rows are
curves by layer, which say nothing of the weights they were made with: no cell of a table holds one."""


def no_cell(metric: str) -> str:
    """Why a cell of a diagnostic holds no number."""
    what, name = DIAGNOSTICS[metric]
    return f"{what}: mmkv-bench diagnose {name}" if name else f"{what}: no diagnostic measures it"


@dataclass(frozen=True)
class Margin:
    """What a printed number may differ by (`margins.yaml`): printed value = scale x ours; margin, spread and gate are in the
    printed unit, or shares of the printed value where `relative`."""

    scale: float
    margin: float
    spread: float
    relative: bool = False
    gate: float | None = None

    @property
    def tolerance(self) -> float:
        """Of the full-cache gate."""
        return self.margin if self.gate is None else self.gate


def margin(dataset: str, metric: str) -> Margin:
    """The margin of a metric; of a mean, that of what it is a mean of.

    Raises:
        ConfigError: nobody has fixed one.
    """
    name = metric if metric != MEAN else "group" if is_group(dataset) else dataset
    known = _margins()
    if name not in known:
        raise ConfigError(f"margins.yaml fixes nothing for {name!r}; {nearest(name, known)}")
    return known[name]


def has_numbers(metric: str) -> bool:
    """Whether rows can hold a metric: it is no diagnostic."""
    return metric not in DIAGNOSTICS


@cache
def _margins() -> Mapping[str, Margin]:
    import yaml

    told: dict[str, Any] = yaml.safe_load((reference_dir() / "margins.yaml").read_text(encoding="utf-8"))
    return {name: Margin(**values) for name, values in told["metrics"].items()}

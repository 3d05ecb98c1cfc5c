"""Metrics of the papers' tables that are no scores: where their numbers come from, and what a printed one may differ by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmkv_bench.config.schema import reference_dir
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.papers.address import MEAN, Address, is_group

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
    # the prompt's and one token; bytes_held has the answer's slots as well
    "kv_gib": Reduction("bytes_useful_step", GIB),
    "kv_gb": Reduction("bytes_useful_step", 1e9),
    "peak_gb": Reduction("peak_total", 1e9),
}
"""Metric -> what of a timed pass it reduces (`scenario=efficiency`, columns of `tables.passes`)."""


@dataclass(frozen=True)
class Diagnostic:
    """What a figure shows that is no score: curves of `mmkv-bench diagnose`.

    Attributes:
        what: the figure shows; name: of the analysis.
        lines: (label, quantity, part) of each line; part `*`: whatever the rows of the method name.
        of_method: its rows are of a method at a budget.
        at: where a layer's number is taken on its curve: from x to x (added up), at the budget, or at a parameter of the
            method; None where there is no curve. per: what it is multiplied by.
    """

    what: str
    name: str
    lines: tuple[tuple[str, str, str], ...]
    of_method: bool = False
    at: tuple[float, float] | str | None = None
    per: float = 1.0

    def stretch(self, address: Address) -> tuple[float, float] | None:
        """From where to where on the curve the number of an address is taken."""
        if not isinstance(self.at, str):
            return self.at
        place = float(address.budget if self.at == "budget" else address.method.setting(self.at))
        return place, place


def _sides(*quantities: str, suffix: str = "", parts: tuple[str, ...] = ("prompt", "answer")) -> Any:
    return tuple((f"{part} {suffix or quantity}", quantity, part) for part in parts for quantity in quantities)


DIAGNOSTICS = {
    "hidden_mean_std": Diagnostic(
        "mean and spread of hidden states per layer, prompt against answer", "hidden_states", _sides("mean", "std")
    ),
    "hidden_histogram": Diagnostic(
        "histogram of hidden states per layer; share of them within 1 of zero",
        "histogram",
        _sides("density", suffix="within 1"),
        at=(-1.0, 1.0),
        per=0.25,  # the width of a bin
    ),
    "attention_coverage": Diagnostic(
        "share of decode attention on kept entries", "coverage", (("", "attention_coverage", "*"),), of_method=True
    ),
    "outlier_hit_rate": Diagnostic(
        "share of outlier channels that the proxies reach",
        "outlier_hits",
        (("", "outlier_hit_rate", ""),),
        at="gamma",
        per=100.0,
    ),
    "lorenz": Diagnostic("cumulative priority per layer, and its Gini coefficient", "lorenz", (("Gini", "gini", ""),)),
    "layer_ratio": Diagnostic("kept ratio per layer", "prefix_search", (("", "kept_ratio", ""),), at="budget"),
    "feature_error": Diagnostic(
        "mean absolute error of hidden states per layer", "feature_error", (("", "feature_error", "*"),), of_method=True
    ),
    "search_steps": Diagnostic("steps of the online search", "prefix_search", (("", "search_steps", ""),), at="delta"),
    "power_spectrum": Diagnostic(
        "energy of keys and values over frequency; share of it in the lowest eighth",
        "power_spectrum",
        _sides("power", suffix="in the lowest eighth", parts=("keys", "values")),
        at=(0.0, 0.125),
    ),
    "focus_counts": Diagnostic(
        "how often tokens are among the top of the decode attention; share of that on 5 % of the tokens",
        "focus",
        (("on 5 % of the tokens", "focus", ""),),
        at=(0.05, 0.05),
    ),
    "cumulative_attention": Diagnostic(
        "attention over the top share of tokens, per head; on the top 20 %",
        "cumulative_attention",
        (("on the top 20 %", "top_mass", ""),),
        at=(0.2, 0.2),
    ),
    "cross_modal_entropy": Diagnostic(
        "entropy of the attention between text and image, per layer", "entropy", (("nats", "cross_modal_entropy", ""),)
    ),
}
"""Metric -> what an analysis shows, and which of its rows."""


@dataclass(frozen=True)
class Margin:
    """The most that a printed number may differ by (`margins.yaml`): printed value = scale x ours; margin, step (what
    repeating a run may change) and gate are in the printed unit, or shares of the printed value where `relative`."""

    scale: float
    margin: float
    relative: bool = False
    step: float = 0.0
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
    """Whether answers or passes hold a metric: it is no diagnostic, which is shown and not judged."""
    return metric not in DIAGNOSTICS


@cache
def _margins() -> Mapping[str, Margin]:
    import yaml

    told: dict[str, Any] = yaml.safe_load((reference_dir() / "margins.yaml").read_text(encoding="utf-8"))
    return {name: Margin(**values) for name, values in told["metrics"].items()}

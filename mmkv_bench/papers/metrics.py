"""Metrics of the papers' tables that are no scores of answers: columns of answers and timed passes, and diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.papers.address import Address

GIB = 2.0**30


@dataclass(frozen=True)
class Reduction:
    """A column of `responses`, as its mean over samples, or of timed passes, as its median over repeats; divided by `per`.

    layers: how the entries kept per layer and head become a number.
    """

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
"""Metric -> the column of answers that it reduces."""
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
"""Metric -> the column of timed passes that it reduces (`scenario=efficiency`, columns of `tables.passes`)."""


@dataclass(frozen=True)
class Diagnostic:
    """A figure's quantity that is no score: curves of `mmkv-bench diagnose`.

    Attributes:
        what: description; name: of the analysis.
        lines: (label, quantity, part) of each line; part `*`: any part that the rows name.
        of_method: True where its rows belong to a method at a budget.
        at: place on its curve where a layer's number is taken: from x to x (added up), at the budget, or at a parameter of
            the method; None where there is no curve.
        per: factor of its numbers.
    """

    what: str
    name: str
    lines: tuple[tuple[str, str, str], ...]
    of_method: bool = False
    at: tuple[float, float] | str | None = None
    per: float = 1.0

    def stretch(self, address: Address) -> tuple[float, float] | None:
        """Return the stretch of the curve that the number of an address is taken from."""
        if not isinstance(self.at, str):
            return self.at
        place = float(address.budget if self.at == "budget" else address.method.setting(self.at))
        return place, place


def _sides(
    *quantities: str, suffix: str = "", parts: tuple[str, ...] = ("prompt", "answer")
) -> tuple[tuple[str, str, str], ...]:
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
"""Metric -> its diagnostic."""


def has_numbers(metric: str) -> bool:
    """Tell whether answers or timed passes hold a metric; diagnostics are shown and not judged."""
    return metric not in DIAGNOSTICS

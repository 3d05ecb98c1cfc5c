"""Metrics of the papers' tables that are not scores of answers: columns of answers and timed passes, and diagnostics.

The file also computes numbers that need neither weights nor data, and names the missing inputs of the others.

A cache's bytes are its entries times the bytes of an entry, which follow from the model's shape. A prompt's number of tokens is
not computed: the picture sizes of a data set are unknown until it is read.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

from mmkv_bench.config.files import content, reference_dir
from mmkv_bench.config.schema import READINGS
from mmkv_bench.families.facts import StatedConfig, kv_bytes_per_token
from mmkv_bench.papers.address import FRACTION, NONE, SYNTHETIC, Address

GIB = 2.0**30


@dataclass(frozen=True)
class Reduction:
    """Rule that turns a column of rows into one table number. Columns of `responses` are averaged over samples. Columns of timed
    passes take the median over repeats.

    per: divisor that converts to the printed unit.
    layers: how the kept shares of layers become one number. `std`: their standard deviation over samples, averaged over layers.
    `mad`: their mean absolute distance to a profile. Empty for other columns.
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
"""Metric -> the column of answers from which it is computed."""
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
"""Metric -> the column of timed passes from which it is computed (`scenario=efficiency`, columns of `cost_rows.passes`)."""


@dataclass(frozen=True)
class Diagnostic:
    """A quantity of a figure that is no score: curves of `mmkv-bench diagnose`.

    Attributes:
        name: name of the analysis (`diagnostics.quantities.QUANTITIES` defines it).
        lines: (label, quantity, part) of each line; part `*`: any part in the rows.
        of_method: the numbers depend on a method and its budget, not on the model alone.
        at: where on the curve a layer's number is taken: (first x, last x) of a stretch that is added up, "budget", or the name
            of a parameter of the method; None if each layer has one number and no curve.
        per: factor by which the numbers are multiplied.
    """

    name: str
    lines: tuple[tuple[str, str, str], ...]
    of_method: bool = False
    at: tuple[float, float] | str | None = None
    per: float = 1.0

    def stretch(self, address: Address) -> tuple[float, float] | None:
        """Return (first x, last x) of the part of the curve from which the number is taken; None if there is no curve.

        If `at` is the budget or a parameter of the method, its value in `address` is used.
        """
        if not isinstance(self.at, str):
            return self.at
        setting_value = float(address.budget if self.at == "budget" else address.method.setting(self.at))
        return setting_value, setting_value


def _sides(
    *quantities: str, suffix: str = "", parts: tuple[str, ...] = ("prompt", "answer")
) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"{part} {suffix or quantity}", quantity, part) for part in parts for quantity in quantities)


DIAGNOSTICS = {
    "hidden_mean_std": Diagnostic("hidden_states", _sides("mean", "std")),
    "hidden_histogram": Diagnostic(
        "histogram",
        _sides("density", suffix="within 1"),
        at=(-1.0, 1.0),
        per=0.25,  # the width of a bin
    ),
    "attention_coverage": Diagnostic("coverage", (("", "attention_coverage", "*"),), of_method=True),
    "outlier_hit_rate": Diagnostic("outlier_hits", (("", "outlier_hit_rate", ""),), at="gamma", per=100.0),
    "lorenz": Diagnostic("lorenz", (("Gini", "gini", ""),)),
    "layer_ratio": Diagnostic("prefix_search", (("", "kept_ratio", ""),), at="budget"),
    "feature_error": Diagnostic("feature_error", (("", "feature_error", "*"),), of_method=True),
    "search_steps": Diagnostic("prefix_search", (("", "search_steps", ""),), at="delta"),
    "power_spectrum": Diagnostic(
        "power_spectrum", _sides("power", suffix="in the lowest eighth", parts=("keys", "values")), at=(0.0, 0.125)
    ),
    "focus_counts": Diagnostic("focus", (("on 5 % of the tokens", "focus", ""),), at=(0.05, 0.05)),
    "cumulative_attention": Diagnostic("cumulative_attention", (("on the top 20 %", "top_mass", ""),), at=(0.2, 0.2)),
    "cross_modal_entropy": Diagnostic("entropy", (("nats", "cross_modal_entropy", ""),)),
}
"""Metric -> its diagnostic."""


def has_numbers(metric: str) -> bool:
    """Return True if a metric comes from answers or timed passes, False for a diagnostic, which is shown and not judged."""
    return metric not in DIAGNOSTICS


BYTES: Mapping[str, float] = {"kv_gib": GIB, "kv_gb": 1e9}
"""Metric of a cache's size -> bytes per unit."""
TOKENS, PEAK = "prompt_tokens", "peak_gb"
PEAKS = reference_dir() / "planned" / "peaks.csv"
"""Peaks counted by `plan --memory` (`tools/planned_peaks.py`), which takes minutes to run."""
PLANNED_COLUMNS = ("setting", "model", "dataset", "method", "budget", "length", "new_tokens", "phase", "bytes")
_PROMPTED = ("hybridkv",)
"""Methods whose bytes depend on the prompt: only with weights is it known which heads keep what."""
_FEWER_BITS = ("kivi", "kivi_prefixkv")


def cache_size(address: Address) -> tuple[float, str] | None:
    """Return (size, how it was computed) of the KV cache after a prompt of `address.length` tokens, batch 1.

    The size is in the metric's unit. Return None if the metric is no cache size, or if the size does not follow from the
    model's shape.
    """
    if address.metric not in BYTES or address.dataset not in SYNTHETIC or not address.length:
        return None
    if address.method.base in (*_PROMPTED, *_FEWER_BITS) or not address.runs or not model_file(address.model)["shape"]:
        return None
    entries, each = _entries(address), bytes_per_token(address.model)
    return entries * each / BYTES[address.metric], f"{entries:,} entries of {each:,} bytes"


def planned_peak(address: Address) -> tuple[float, str] | None:
    """Return (peak memory [GB], how it was counted) of a timed pass, from the file of dry runs.

    Return None if the metric is no peak, or if the dry run was not made.
    """
    if address.metric != PEAK or address.batch not in (None, 1) or address.reading != READINGS[0]:
        return None
    key = (address.model, address.dataset, str(address.method), address.budget, address.length, address.new_tokens)
    planned_row = _peaks().get(key)
    return (
        None
        if planned_row is None
        else (int(planned_row["bytes"]) / 1e9, f"counted in a dry run, {planned_row['phase']}")
    )


def planned_lines() -> list[dict[str, str]]:
    """Return the rows of the file `PEAKS` (peaks of memory counted in dry runs), as mappings of column to text."""
    if not PEAKS.is_file():
        return []
    with PEAKS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def missing_input(address: Address) -> str:
    """Return a text on what is needed, besides a device, to measure a number that was not run; "" if a device is enough.

    The text also has what is known about the number already.
    """
    if address.metric in BYTES and address.dataset in SYNTHETIC and address.method.base in _PROMPTED:
        kept_share = _entries(address) / (address.length or 1)
        return f"needs weights, which tell heads apart; a step reads {kept_share:.1%} of full's entries"
    if address.metric == TOKENS and address.runs:
        return "needs the pictures' sizes"
    return ""


@cache
def model_file(model: str) -> Mapping[str, Any]:
    """Return the content of a model's file in conf/model; `shape` is empty if the file has none."""
    return {"shape": {}, **content("model", model)}


@cache
def bytes_per_token(model: str) -> int:
    """Return the bytes of one token's keys and values in all layers and KV heads, in the dtype of the model's file."""
    return kv_bytes_per_token(StatedConfig(model_file(model)["shape"]), model_file(model)["dtype"])


@cache
def _peaks() -> dict[tuple[object, ...], dict[str, str]]:
    """Return timed pass (model, dataset, method, budget, length, new tokens) -> its row of the file `PEAKS`."""
    lengths = ("length", "new_tokens")
    return {
        (*(line[name] for name in PLANNED_COLUMNS[1:5]), *(int(line[name]) for name in lengths)): line
        for line in planned_lines()
    }


def _entries(address: Address) -> int:
    """Return the number of entries per KV head that the budget of `address` allows: the exact floor, at least one."""
    length = address.length or 0
    if address.budget_kind == NONE:
        return length
    budget = Decimal(address.budget)
    return min(length, max(1, int(budget * length) if address.budget_kind == FRACTION else int(budget)))

"""Metrics of the papers' tables that are no scores: times, bytes and counts of rows, and diagnostics.

Some numbers need no run: a cache's bytes follow from the model's shape, and dry runs count peaks of memory.
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
    """Rule that reduces a column to a number: mean over samples (`responses`), or median over repeats (timed passes).

    per: divisor that converts to the printed unit.
    layers: rule for the share of entries that each layer keeps. `std`: standard deviation over samples, averaged over layers;
        `mad`: mean absolute distance to the shares of a profile; "" for other columns.
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
"""Metric -> reduction of a column of answers."""
PASSES = {
    "ttft_s": Reduction("ttft_s"),
    "total_s": Reduction("total_s"),
    "tpot_ms": Reduction("tpot_s", 1e-3),
    "tokens_per_s": Reduction("tokens_s"),
    "selection_ms": Reduction("select_s", 1e-3),
    # entries of the prompt and one token; bytes_held would include slots for the answer
    "kv_gib": Reduction("bytes_useful_step", GIB),
    "kv_gb": Reduction("bytes_useful_step", 1e9),
    "peak_gb": Reduction("peak_total", 1e9),
}
"""Metric -> reduction of a column of timed passes (`cost_rows.passes`)."""


@dataclass(frozen=True)
class Diagnostic:
    """A quantity of a figure that `mmkv-bench diagnose` measures.

    Attributes:
        name: name of the analysis (`diagnostics.quantities.QUANTITIES`).
        lines: (label, quantity, part) of each line of the figure; part `*`: any part in the rows.
        of_method: True if the numbers depend on a method and budget, False if on the model alone.
        at: values x of the curve that are added up to a layer's number: (first, last), "budget", or the name of a parameter of
            the method; None if each layer has one number and no curve.
        per: factor by which the numbers are multiplied.
    """

    name: str
    lines: tuple[tuple[str, str, str], ...]
    of_method: bool = False
    at: tuple[float, float] | str | None = None
    per: float = 1.0

    def stretch(self, address: Address) -> tuple[float, float] | None:
        """Return (first, last) value x of the curve to add up, with the budget or parameter of `address`; None without curve."""
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
"""Metric -> diagnostic."""


def has_numbers(metric: str) -> bool:
    """Return False for a diagnostic, whose numbers are shown and not judged."""
    return metric not in DIAGNOSTICS


BYTES: Mapping[str, float] = {"kv_gib": GIB, "kv_gb": 1e9}
"""Metric of the cache's size -> bytes per unit."""
TOKENS, PEAK = "prompt_tokens", "peak_gb"
PEAKS = reference_dir() / "planned" / "peaks.csv"
"""Peaks of memory counted in dry runs (`tools/planned_peaks.py`)."""
PLANNED_COLUMNS = ("setting", "model", "dataset", "method", "budget", "length", "new_tokens", "phase", "bytes")
_PROMPTED = ("hybridkv",)
"""Methods whose bytes depend on the prompt and the weights."""
_FEWER_BITS = ("kivi", "kivi_prefixkv")


def cache_size(address: Address) -> tuple[float, str] | None:
    """Return (size in the metric's unit, text on the computation) of the KV cache after a prompt of `address.length` tokens.

    The batch is 1. Return None if the metric is no cache size, or the size does not follow from the model's shape.
    """
    if address.metric not in BYTES or address.dataset not in SYNTHETIC or not address.length:
        return None
    if address.method.base in (*_PROMPTED, *_FEWER_BITS) or not address.runs or not model_file(address.model)["shape"]:
        return None
    entries, each = _entries(address), bytes_per_token(address.model)
    return entries * each / BYTES[address.metric], f"{entries:,} entries of {each:,} bytes"


def planned_peak(address: Address) -> tuple[float, str] | None:
    """Return (peak memory [GB], text on the dry run) of a timed pass; None if the metric is no peak or without a dry run."""
    if address.metric != PEAK or address.batch not in (None, 1) or address.reading != READINGS[0]:
        return None
    key = (address.model, address.dataset, str(address.method), address.budget, address.length, address.new_tokens)
    planned_row = _peaks().get(key)
    return (
        None
        if planned_row is None
        else (int(planned_row["bytes"]) / 1e9, f"counted in a dry run, {planned_row['phase']}")
    )


def planned_rows() -> list[dict[str, str]]:
    """Return the rows of the file `PEAKS`, column -> text; [] without the file."""
    if not PEAKS.is_file():
        return []
    with PEAKS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def missing_input(address: Address) -> str:
    """Return a text on the inputs, besides a device, that a run of the number needs; "" if a device is enough."""
    if address.metric in BYTES and address.dataset in SYNTHETIC and address.method.base in _PROMPTED:
        kept_share = _entries(address) / (address.length or 1)
        return f"needs weights, which tell heads apart; a step reads {kept_share:.1%} of full's entries"
    if address.metric == TOKENS and address.runs:
        return "needs the pictures' sizes"
    return ""


@cache
def model_file(model: str) -> Mapping[str, Any]:
    """Return the content of a model's file in conf/model, with an empty `shape` if the file has none."""
    return {"shape": {}, **content("model", model)}


@cache
def bytes_per_token(model: str) -> int:
    """Return the bytes of a token's keys and values in all layers and KV heads, in the dtype of the model's file."""
    return kv_bytes_per_token(StatedConfig(model_file(model)["shape"]), model_file(model)["dtype"])


@cache
def _peaks() -> dict[tuple[object, ...], dict[str, str]]:
    """Return (model, dataset, method, budget, length, new tokens) -> row of the file `PEAKS`."""
    lengths = ("length", "new_tokens")
    return {
        (*(line[name] for name in PLANNED_COLUMNS[1:5]), *(int(line[name]) for name in lengths)): line
        for line in planned_rows()
    }


def _entries(address: Address) -> int:
    """Return the number of entries per KV head that the budget allows, rounded down, at least one."""
    length = address.length or 0
    if address.budget_kind == NONE:
        return length
    budget = Decimal(address.budget)
    return min(length, max(1, int(budget * length) if address.budget_kind == FRACTION else int(budget)))

"""Numbers of the tables that no weights and no data are needed for, and what is known of those that need them.

A cache's bytes are entries times the bytes of one, which the model's shape states. How many tokens a picture becomes follows
from its size and the processor's settings; how large a data set's pictures are, its questions do not say.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from typing import Any

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import READINGS, reference_dir
from mmkv_bench.families.config_file import StatedConfig
from mmkv_bench.families.facts import kv_bytes_per_token
from mmkv_bench.families.registry import image_tokens
from mmkv_bench.papers.address import FRACTION, NONE, SYNTHETIC, Address
from mmkv_bench.papers.metrics import GIB

BYTES: Mapping[str, float] = {"kv_gib": GIB, "kv_gb": 1e9}
"""Metric of a cache's size -> bytes of its unit."""
TOKENS, PEAK = "prompt_tokens", "peak_gb"
PEAKS = reference_dir() / "planned" / "peaks.csv"
"""Peaks that `plan --memory` counted (`tools/planned_peaks.py`): the dry run takes minutes, a page of tables seconds."""
PLANNED_COLUMNS = ("setting", "model", "dataset", "method", "budget", "length", "new_tokens", "phase", "bytes")
_PROMPTED = ("hybridkv",)
"""Families whose bytes on the device follow the prompt: which heads keep what is known with weights alone."""
_FEWER_BITS = ("kivi", "kivi_prefixkv")
_SIDES = tuple(range(28, 3585, 28))
"""Widths and heights of the pictures that are tried for a processor's least and most tokens [pixels]."""


def cache_size(address: Address) -> tuple[float, str] | None:
    """(size in the metric's unit, how) of the keys and values that a prompt of the address's length leaves, batch of one; None
    where it is no such number, or where it does not follow from the shape."""
    if address.metric not in BYTES or address.dataset not in SYNTHETIC or not address.length:
        return None
    if address.method.base in (*_PROMPTED, *_FEWER_BITS) or not (address.runs and _shaped(address.model)):
        return None
    entries, each = _entries(address), bytes_per_token(address.model)
    return entries * each / BYTES[address.metric], f"{entries:,} entries of {each:,} bytes"


def planned_peak(address: Address) -> tuple[float, str] | None:
    """(GB, how) of the most that a pass of the address holds, as a dry run of the code at the model's shape counted it; None
    where it is no peak, or none was counted."""
    if address.metric != PEAK or address.batch not in (None, 1) or address.reading != READINGS[0]:
        return None
    key = (address.model, address.dataset, str(address.method), address.budget, address.length, address.new_tokens)
    found = _peaks().get(key)
    return None if found is None else (int(found["bytes"]) / 1e9, f"counted in a dry run, {found['phase']}")


def planned_lines() -> list[dict[str, str]]:
    """The lines of `PEAKS`."""
    if not PEAKS.is_file():
        return []
    with PEAKS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def _peaks() -> dict[tuple[object, ...], dict[str, str]]:
    """By what an address says of them; a pass that two settings have is the same."""
    return {
        (*(line[name] for name in PLANNED_COLUMNS[1:5]), int(line["length"]), int(line["new_tokens"])): line
        for line in planned_lines()
    }


def lacking(address: Address) -> str:
    """What a number that was not run needs besides a device, with what is known of it; empty where nothing is to be said."""
    if address.metric in BYTES and address.dataset in SYNTHETIC and address.method.base in _PROMPTED:
        share = _entries(address) / (address.length or 1)
        return f"needs weights, by which heads are told apart; {share:.1%} of full's entries are read in a step"
    if address.metric == TOKENS and address.runs:
        low, high = image_bounds(address.model)
        return f"needs the pictures' sizes; one becomes {low:,} to {high:,} tokens"
    return ""


def _entries(address: Address) -> int:
    """Entries per KV head that a budget comes to: the exact floor, at least one."""
    length = address.length or 0
    if address.budget_kind == NONE:
        return length
    budget = Decimal(address.budget)
    return min(length, max(1, int(budget * length) if address.budget_kind == FRACTION else int(budget)))


@cache
def _shaped(model: str) -> bool:
    return bool(content("model", model).get("shape"))


@cache
def bytes_per_token(model: str) -> int:
    """Of the keys and values in all layers and KV heads of a model of conf/model, in the precision of its file."""
    told = content("model", model)
    return kv_bytes_per_token(StatedConfig(told["shape"]), told["dtype"])


@cache
def image_bounds(model: str) -> tuple[int, int]:
    """The fewest and the most visual tokens of one picture whose sides are 28 to 3,584 pixels, neither 20 times the other."""
    told: dict[str, Any] = content("model", model)
    kind, settings = told["shape"]["model_type"], told["processor"]
    sizes = [(width, height) for width in _SIDES for height in _SIDES if max(width, height) <= 20 * min(width, height)]
    counts = [image_tokens(kind, settings, *size) for size in sizes]
    return min(counts), max(counts)

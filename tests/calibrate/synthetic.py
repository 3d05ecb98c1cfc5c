"""Calibrations of models that were never measured, for tests that need any valid one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def data(method: str, layers: int, kv_heads: int, group: int = 1) -> dict[str, Any]:
    """Data as the artefact of this method has it, uneven over layers and heads."""
    if method == "sparsemm":
        scores = [[float((3 * layer + 5 * head) % 7) for head in range(kv_heads * group)] for layer in range(layers)]
        return {"scores": scores, "kv_heads": kv_heads}
    if method == "prefixkv":
        weights = [layers - layer for layer in range(layers)]
        ratios = [[rho * layers * weight / sum(weights) for weight in weights] for rho in (0.1, 0.5)]
        return {"layers": layers, "grid": [0.1, 0.5], "ratios": ratios}
    if method == "hybridkv":
        return {"theta": 0.5}
    raise KeyError(method)


def calibrated(part: T, layers: int, kv_heads: int) -> T:
    """The same part (or compressor) with `data` wherever a calibration is only named; nothing else is changed."""
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changes = {}
    for item in fields(part):
        value = getattr(part, item.name)
        if item.name == "calibration" and isinstance(value, str):
            changes[item.name] = data(part.calibrated_by, layers, kv_heads)
        elif is_dataclass(value) and (new := calibrated(value, layers, kv_heads)) is not value:
            changes[item.name] = new
    return replace(part, **changes) if changes else part

"""`decode=compiled`: the model's decode step as one graph, on CUDA replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig

from mmkv_bench import devices

EAGER_DECODE = "eager_decode"  # the fallback of cells whose decode policy acts, under decode=compiled
RECOMPILES = 64  # programs of one model: by rows (one or several), ragged or not, and the protocol's first step


def config_of(device: torch.device, backend: str | Callable[..., Any] = "inductor") -> CompileConfig:
    """How stock `generate()` compiles its decode step on a cache of fixed capacity, as `CompiledStep` does."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=_mode(device, backend))
    config._compile_all_devices = True
    return config


def _mode(device: torch.device, backend: str | Callable[..., Any]) -> str | None:
    return devices.at(device).compile_mode if backend == "inductor" else None


class CompiledStep:
    """The forward pass of one token per row, compiled when it is called first; called like the model.

    A program is made for one row and one for several, for ragged heads and for none; capacities and rows are symbols in it,
    so that the next prompt finds it made.

    Args:
        model: with a session attached; its cache is a fixed one (`compression/fixed.py`).
        backend: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor"):
        options: dict[str, Any] = {  # a graph break and a program too many are errors, never a silent eager step
            "fullgraph": True,
            "backend": backend,
            "mode": _mode(next(model.parameters()).device, backend),
            "recompile_limit": RECOMPILES,
            "isolate_recompiles": True,
        }
        self._forward: Callable[..., Any] = torch.compile(model.__call__, **options)

    def __call__(self, **inputs: Any) -> Any:
        return self._forward(**inputs)

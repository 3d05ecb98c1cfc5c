"""torch, imported at the first use of one of its names, because commands that compute nothing also import this package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)
            return value

    torch = _Torch()
    Tensor = Any
    """For annotations; `torch.Tensor` is the class."""

__all__ = ["Tensor", "torch"]

"""torch, imported at the first use of one of its names, because commands that compute nothing also import parts of methods."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        """A stand-in for the module; each name that was used once becomes an attribute."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)
            return value

    torch = _Torch()
    Tensor = Any
    """For annotations; `torch.Tensor` is the class."""

__all__ = ["Tensor", "torch"]

"""A composed method as its parts see it."""

from __future__ import annotations

from typing import Protocol


class Composed(Protocol):
    """Which parts stand beside each other; `compressor.Compressor` is one. None where a method has no such part."""

    @property
    def scorer(self) -> object: ...

    @property
    def allocator(self) -> object: ...

    @property
    def selector(self) -> object: ...

    @property
    def reducer(self) -> object: ...

    @property
    def decoding(self) -> object: ...

"""A composed method as its parts see it."""

from __future__ import annotations

from typing import Protocol


class Composed(Protocol):
    """Parts of one method, None where it has no such part; `compressor.Compressor` implements it."""

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

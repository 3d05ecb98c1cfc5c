"""Context of a prompt and the parts of a method, as allocators and decode policies are given them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from mmkv_bench.compression.lazy_torch import Tensor


@dataclass(frozen=True)
class Context:
    """One prompt (or, under ``query_agnostic``, its context) that is about to be reduced.

    Attributes:
        budget: C, entries per KV head; the entries of tokens that are fed again are part of it.
        length: T, tokens of the prompt. refed: so many of the last ones will be fed again and are no candidates.
        types: int ``[T]``, 0 text, 1 image, 2 video; None when unknown.
        summaries: layer -> what ``Allocator.summary`` made of it. Scope "model": all layers; scope "layer": those up to
            the layers at hand, so that an allocator can replay what it carried from layer to layer.
        asked: the fraction of T that was asked for, of which C is the whole part; None for a budget in entries.
    """

    budget: int
    length: int
    refed: int = 0
    types: Tensor | None = None
    summaries: Mapping[int, Tensor] = field(default_factory=dict)
    asked: Fraction | None = None

    @property
    def candidates(self) -> int:
        """n: tokens that can be kept."""
        return self.length - self.refed

    @property
    def candidate_types(self) -> Tensor | None:
        """Token type of each candidate, int ``[n]``; None where no types are known."""
        return None if self.types is None else self.types[: self.candidates]


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

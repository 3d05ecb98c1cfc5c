"""The facts about a prompt that allocators and decode policies receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from mmkv_bench.compression.lazy_torch import Tensor


@dataclass(frozen=True)
class Context:
    """One prompt (or, under ``query_agnostic``, its context) that is about to be reduced.

    ``summaries`` maps a layer to what ``Allocator.summary`` returned. With scope "model" it has all layers; with scope
    "layer" it has the layers so far, from which an allocator can recompute what it carries from layer to layer.
    """

    budget: int  # C, entries per KV head, including the entries of tokens that are fed again
    length: int  # T, tokens of the prompt
    refed: int = 0  # last tokens that will be fed again and are not candidates
    types: Tensor | None = None  # int [T], 0 text, 1 image, 2 video; None when unknown
    summaries: Mapping[int, Tensor] = field(default_factory=dict)
    asked: Fraction | None = None  # requested fraction of T (C: product, rounded down); None for a budget in entries

    @property
    def candidates(self) -> int:
        """n: tokens that can be kept."""
        return self.length - self.refed

    @property
    def candidate_types(self) -> Tensor | None:
        """Token type of each candidate, int ``[n]``; None if types are unknown."""
        return None if self.types is None else self.types[: self.candidates]


class Composed(Protocol):
    """The parts of one method, None for missing parts, as in `compressor.Compressor`."""

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

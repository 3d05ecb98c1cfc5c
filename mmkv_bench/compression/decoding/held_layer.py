"""Cache layer that keeps its size while decoding, for fixed-distance eviction and a sliding window."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

import torch

from mmkv_bench.compression.cache import CompressedLayer

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.decoding.base import Start


class HoldingPolicy(Protocol):
    """Interface of the decode policy of a held layer (`Holding`)."""

    @property
    def hold(self) -> str: ...

    @property
    def slack(self) -> int: ...

    def slot(self, entries: int, start: int) -> int: ...


class HeldLayer(CompressedLayer):
    """One layer of one sequence whose policy evicts after every answer token.

    Attributes:
        acts_from: logical index of the answer's first token.
    """

    policy: HoldingPolicy
    acts_from: int

    def begin(self, policy: HoldingPolicy, start: Start) -> None:
        """Remember what every head holds when the answer begins."""
        self.policy, self.acts_from = policy, start.acts_from
        kept = (start.index >= 0).sum(-1).tolist()
        appended = start.acts_from - start.seen  # the question, or the token that is fed again
        self._before = [count + appended for count in kept]
        self._start = [count + policy.slack for count in self._before]
        self._ratio = [Fraction(count + start.context.refed + policy.slack, start.context.length) for count in kept]
        self._evicted = [0] * len(kept)

    def held(self) -> list[int]:
        """Current entries per head."""
        fed = self.seen - self.acts_from
        return [before + fed - gone for before, gone in zip(self._before, self._evicted, strict=True)]

    def attended(self, query: Tensor, scaling: float) -> None:
        fed = self.seen - self.acts_from
        if fed <= 0:
            return
        while any(due := self._due(fed)):
            self._evict(due)

    def _due(self, fed: int) -> list[bool]:
        growth = self._ratio if self.policy.hold == "ratio" else [Fraction(0)] * len(self._ratio)
        return [
            held >= start + share * fed + 1 for held, start, share in zip(self.held(), self._start, growth, strict=True)
        ]

    def _evict(self, due: list[bool]) -> None:
        """Remove one entry from every head that is due."""
        held = self.held()
        slots = [
            self.stored - count + self.policy.slot(count, start) for count, start in zip(held, self._start, strict=True)
        ]
        for head, is_due in enumerate(due):
            self._evicted[head] += is_due
        if all(due):
            self.drop(torch.tensor([slots]))
            return
        gone = torch.tensor([[slot if is_due else -1 for slot, is_due in zip(slots, due, strict=True)]])
        places = self.positions
        assert places is not None, "a layer made of rows has positions"
        stays = (places >= 0) & (torch.arange(self.stored, device=self.device) != gone[..., None].to(self.device))
        # Right-align what stays: a stable sort puts it last, in its old order.
        width = max(count - is_due for count, is_due in zip(held, due, strict=True))
        index = stays.int().sort(dim=-1, stable=True).indices[..., self.stored - width :]
        filled = stays.gather(2, index)
        positions = places.gather(2, index).masked_fill(~filled, -1)
        # Where a head that is not due fills all slots, the others' entries before the one that goes move to the right.
        right = width == self.stored
        self._move(index.where(filled, torch.arange(width, device=index.device)), right)
        places[:, :, :width] = positions
        self.stored, self.ragged = width, bool(len(set(map(int.__sub__, held, due))) > 1)

"""Cache layer that evicts while decoding, for fixed-distance eviction and a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.decoding.base import Start


class EvictingLayer(CompressedLayer):
    """One layer of one sequence whose policy evicts after every answer token."""

    acts_from: int  # logical index of the answer's first token
    _slot: Callable[[int, int], int]
    _initial: list[int]  # entries of each head when the answer begins
    _allowed: list[int]  # the same plus slack
    _growth: list[Fraction]  # further entries that each head may hold per answer token
    _evicted: list[int]  # entries that each head has evicted

    @classmethod
    def of(cls, start: Start, room: int, slack: int, grows: bool, slot: Callable[[int, int], int]) -> EvictingLayer:
        """Build the layer of a policy that limits a layer's size (`Holding`).

        Args:
            room: slots for new tokens.
            slack, slot: see `Holding`.
            grows: whether a head's size grows with the answer, by the share that the head kept of the prompt.
        """
        layer = cls.from_rows([(start.kept_key, start.kept_value, start.positions)], start.seen, room)
        layer.acts_from, layer._slot = start.acts_from, slot
        kept = (start.index >= 0).sum(-1).tolist()
        appended = start.acts_from - start.seen  # the question, or the token that is fed again
        layer._initial = [count + appended for count in kept]
        layer._allowed = [count + slack for count in layer._initial]
        layer._growth = [
            Fraction((count + start.context.refed + slack) * grows, start.context.length) for count in kept
        ]
        layer._evicted = [0] * len(kept)
        return layer

    def entry_counts(self) -> list[int]:
        fed = self.seen - self.acts_from
        return [before + fed - gone for before, gone in zip(self._initial, self._evicted, strict=True)]

    def attended(self, query: Tensor, scaling: float) -> None:
        fed = self.seen - self.acts_from
        if fed <= 0:
            return
        while any(due := self._heads_over_size(fed)):
            self._evict(due)

    def _heads_over_size(self, fed: int) -> list[bool]:
        return [
            count >= start + share * fed + 1
            for count, start, share in zip(self.entry_counts(), self._allowed, self._growth, strict=True)
        ]

    def _evict(self, due: list[bool]) -> None:
        """Remove one entry from every head that is ``due``."""
        counts = self.entry_counts()
        slots = [
            self.stored - count + self._slot(count, start) for count, start in zip(counts, self._allowed, strict=True)
        ]
        for head, is_due in enumerate(due):
            self._evicted[head] += is_due
        if all(due):
            self.drop(torch.tensor([slots]))
            return
        evicted_slots = torch.tensor([[slot if is_due else -1 for slot, is_due in zip(slots, due, strict=True)]])
        places = self.positions
        assert places is not None, "a layer made of rows has positions"
        is_evicted = torch.arange(self.stored, device=self.device) == evicted_slots[..., None].to(self.device)
        keeps = (places >= 0) & ~is_evicted
        # Right-align what stays: a stable sort puts kept slots last, in their old order.
        width = max(count - is_due for count, is_due in zip(counts, due, strict=True))
        index = keeps.int().sort(dim=-1, stable=True).indices[..., self.stored - width :]
        gathered_places = keeps.gather(2, index)
        positions = places.gather(2, index).masked_fill(~gathered_places, -1)
        # If a head that is not due fills all slots, the other heads' entries before the evicted one move right.
        is_full_width = width == self.stored
        self._move(index.where(gathered_places, torch.arange(width, device=index.device)), is_full_width)
        places[:, :, :width] = positions
        self.stored, self.ragged = width, bool(len(set(map(int.__sub__, counts, due))) > 1)

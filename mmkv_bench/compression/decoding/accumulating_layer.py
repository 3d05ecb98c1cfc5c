"""Cache layer that accumulates the attention of each entry, for H2O's decoding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.errors import ConfigError


class AccumulatingLayer(CompressedLayer):
    """The entries of one sequence, and the attention that each has received so far.

    Attributes:
        attention_sums: this attention, float32 `[Hkv, stored]`, 0 at padding.
    """

    attention_sums: Tensor
    _counted: int  # earlier queries are in the scores already
    _refed: Tensor  # scores of prompt tokens that will be fed again
    _acts_from: int
    _recents_of: Callable[[int], int]  # entries of a head -> recents among them
    _limit: int  # slots; set at the first token of the answer, as `_recents` [entries per head]
    _recents: Tensor | None
    _sinks: Tensor | None

    @classmethod
    def of(cls, start: Start, recents_of: Callable[[int], int]) -> AccumulatingLayer:
        if start.scores is None:
            raise ConfigError(
                "H2O's decoding starts from the scores of the prefill, but the method has no scorer; give it one"
            )
        room = start.room_until_evicting(1)
        layer = cls.from_rows([(start.kept_key, start.kept_value, start.positions)], start.seen, room)
        scores = start.scores.float()
        layer.attention_sums = scores.gather(1, start.index.clamp_min(0)).masked_fill(start.index < 0, 0)
        layer._counted = start.pad + scores.shape[1]
        layer._refed = scores[:, start.seen - start.pad :].clone()  # a view would keep the scores of the whole prompt
        layer._acts_from, layer._recents_of = start.acts_from, recents_of
        layer._limit, layer._recents, layer._sinks = 0, None, start.sinks
        return layer

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), self.attention_sums, self._refed]

    def attended(self, query: Tensor, scaling: float) -> None:
        """Add the attention of the n newest tokens, ``query [1, Hq, n, D]``, to `attention_sums`, then evict.

        Tokens whose queries the prefill's scores have counted add nothing. Every head evicts one entry for each answer
        token above the layer's size.
        """
        n = query.shape[2]
        self._append_slots(n)
        first_new_token = self.seen - n
        skip = min(max(self._counted - first_new_token, 0), n)
        if skip < n:
            self.attention_sums += self._attention_of(query[0, :, skip:], scaling)
        acting = self.seen - max(first_new_token, self._acts_from)
        if acting <= 0:
            return
        if self._recents is None:
            self._limit = self.stored - acting
            entries = (self.entries()[0] - acting).tolist()
            self._recents = torch.tensor(list(map(self._recents_of, entries)), device=self.device)
        while self.stored > self._limit:
            self._evict(self._recents)

    def _append_slots(self, n: int) -> None:
        """Append n slots to `attention_sums`: the prefill's score for a token that is fed again, 0 for others."""
        heads = self.attention_sums.shape[0]
        new_mass = self.attention_sums.new_zeros(heads, n)
        refed = min(self._refed.shape[1], n)
        new_mass[:, :refed] = self._refed[:, :refed]
        self._refed = self._refed[:, refed:]
        self.attention_sums = torch.cat([self.attention_sums, new_mass], 1)

    def _attention_of(self, query: Tensor, scaling: float) -> Tensor:
        """Return the attention of the newest tokens, ``query [Hq, n, D]``, to every slot: float32 `[Hkv, stored]`.

        It is summed over these tokens and over the query heads of a KV head. A token attends to the slots up to its
        own.
        """
        keys = self.keys[0]
        if not self.ragged:
            return column_sums(query, keys, scaling, self.stored - query.shape[1], self._sinks)
        positions = self.positions
        assert positions is not None, "a layer made of rows has positions"
        sums = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
        group = query.shape[0] // keys.shape[0]
        for head, padding in enumerate((positions[0] < 0).sum(-1).tolist()):
            members, visible = slice(head * group, (head + 1) * group), keys[head : head + 1, padding:]
            sinks = None if self._sinks is None else self._sinks[members]
            sums[head : head + 1, padding:] = column_sums(
                query[members], visible, scaling, visible.shape[1] - query.shape[1], sinks
            )
        return sums

    def _evict(self, recents: Tensor) -> None:
        """Remove from every head the entry with the least attention so far; of equal entries the later one.

        recents: int64 `[Hkv]`, number of last entries of each head that are never removed.
        """
        slot = torch.arange(self.stored, device=self.device)
        is_evictable = (slot < self.stored - recents[:, None]) & (self.slot_positions()[0] >= 0)
        evictable_mass = self.attention_sums.masked_fill(~is_evictable, torch.inf)
        victim = self.stored - 1 - evictable_mass.flip(-1).argmin(-1)
        self.drop(victim[None])
        self.attention_sums = self.attention_sums.gather(1, slot[:-1] + (slot[:-1] >= victim[:, None]))

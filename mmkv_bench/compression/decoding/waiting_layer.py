"""Cache layer that is reduced inside the first decode step, for MEDA's released timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.compression.scorers.text_prior import with_text_prior, without_text_prior
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.allocators.base import Allocator
    from mmkv_bench.compression.decoding.base import Start
    from mmkv_bench.compression.reducers.base import Reducer
    from mmkv_bench.compression.selectors.base import Selector


class WaitingPolicy(Protocol):
    """Interface of the decode policy of a waiting layer (`Late`)."""

    @property
    def allocator(self) -> Allocator: ...

    @property
    def selector(self) -> Selector: ...

    @property
    def reducer(self) -> Reducer: ...

    @property
    def prior(self) -> bool: ...


@dataclass(frozen=True)
class PendingReduction:
    """Part of a `Start` that is kept until the method reduces; nothing in it keeps the original cache alive."""

    layer: int
    n_layers: int
    index: Tensor
    scores: Tensor
    context: Context
    seen: int
    acts_from: int
    reserve: int


class WaitingLayer(CompressedLayer):
    """One layer of one sequence: the full cache until the answer's first token was attended from."""

    _policy: WaitingPolicy
    _start: PendingReduction | None

    @classmethod
    def of(cls, policy: WaitingPolicy, start: Start) -> WaitingLayer:
        if start.scores is None:
            raise ConfigError(
                "reducing in the first decode step starts from the prefill's scores; give the method a scorer"
            )
        heads, n, _ = start.key.shape
        places = torch.arange(n, device=start.key.device).expand(heads, -1) + start.pad
        layer = cls.from_rows([(start.key, start.value, places)], start.seen, start.reserve)
        layer._policy = policy
        layer._start = PendingReduction(
            start.layer,
            start.n_layers,
            start.index,
            start.scores,
            start.context,
            start.seen,
            start.acts_from,
            start.reserve,
        )
        return layer

    def buffers(self) -> list[Tensor]:
        """The method's index and scores among them; token types and summaries are the prompt's, not a layer's."""
        return [*super().buffers(), *([] if self._start is None else [self._start.index, self._start.scores])]

    def attended(self, query: Tensor, scaling: float) -> None:
        if self._start is not None and self.seen > self._start.acts_from:
            start, self._start = self._start, None
            self._reduce(start, query[0, :, -1:], scaling)

    def _reduce(self, start: PendingReduction, query: Tensor, scaling: float) -> None:
        """Reduce the layer as the method does. query: `[Hq, 1, D]` of the newest token."""
        policy, total = self._policy, self.stored
        scores = column_sums(query, self.keys[0], scaling, total - 1)
        before, types = start.scores, start.context.types
        scored = before.shape[1]
        if types is not None:
            types = torch.nn.functional.pad(types.to(scores.device), (0, total - len(types)))
        if policy.prior and types is not None and bool((types > 0).any()):
            scores[:, :scored] += without_text_prior(before, types[:scored])
            scores = with_text_prior(scores, types)
        else:
            scores[:, :scored] += before
        context = Context(start.context.budget, total, 0, types, start.context.summaries)
        (caps,) = policy.allocator.caps([scores], context.budget, [start.layer], start.n_layers, context)
        protected = policy.selector.protected(total, context.budget, types).to(scores.device)
        index = policy.selector.select(scores, caps, protected, types=types)

        def reduce(key: Tensor, value: Tensor, kept: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return policy.reducer.reduce(key, value, kept, types)

        self.retain(index[None], reduce, reserve=max(start.reserve - (self.seen - start.seen), 0))

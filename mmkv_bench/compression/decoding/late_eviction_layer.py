"""Cache layer that is reduced inside the first decode step, for MEDA's released timing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.scorers.text_prior import add_text_prior, remove_text_prior
from mmkv_bench.compression.selectors.base import Selector
from mmkv_bench.errors import ConfigError


class WaitingLayer(CompressedLayer):
    """One layer of one sequence: the full cache until the answer's first token has attended to it."""

    _parts: tuple[Allocator, Selector, Reducer]
    _prior: bool
    _start: Start | None  # None once the layer is reduced

    @classmethod
    def of(cls, start: Start, allocator: Allocator, selector: Selector, reducer: Reducer, prior: bool) -> WaitingLayer:
        """Build the layer of a policy `Late` from the policy's parameters."""
        if start.scores is None:
            raise ConfigError(
                "reducing in the first decode step starts from the prefill's scores, but the method has no "
                "scorer; give it one"
            )
        heads, n, _ = start.key.shape
        all_places = torch.arange(n, device=start.key.device).expand(heads, -1) + start.pad
        layer = cls.from_rows([(start.key, start.value, all_places)], start.seen, start.reserve)
        layer._parts, layer._prior = (allocator, selector, reducer), prior
        none = start.key.new_empty(0)  # does not keep the original cache alive
        layer._start = replace(start, key=none, value=none, kept_key=none, kept_value=none)
        return layer

    def buffers(self) -> list[Tensor]:
        """Return the layer's tensors, including index and scores, without the prompt's token types and summaries."""
        start_tensors = () if self._start is None else (self._start.index, self._start.scores)
        return [*super().buffers(), *(tensor for tensor in start_tensors if tensor is not None)]

    def attended(self, query: Tensor, scaling: float) -> None:
        if self._start is not None and self.seen > self._start.acts_from:
            start, self._start = self._start, None
            self._reduce(start, query[0, :, -1:], scaling)

    def _reduce(self, start: Start, query: Tensor, scaling: float) -> None:
        """Reduce the layer from the prefill's scores and the attention of the newest token, ``query [Hq, 1, D]``."""
        (allocator, selector, reducer), total = self._parts, self.stored
        scores = column_sums(query, self.keys[0], scaling, total - 1, start.sinks)
        prefill_scores, types = start.scores, start.context.types
        assert prefill_scores is not None, "`of` refuses a start without scores"
        scored = prefill_scores.shape[1]
        if types is not None:
            types = torch.nn.functional.pad(types.to(scores.device), (0, total - len(types)))
        if self._prior and types is not None and bool((types > 0).any()):
            scores[:, :scored] += remove_text_prior(prefill_scores, types[:scored])
            scores = add_text_prior(scores, types)
        else:
            scores[:, :scored] += prefill_scores
        context = Context(start.context.budget, total, 0, types, start.context.summaries)
        (caps,) = allocator.caps([scores], context.budget, [start.layer], start.n_layers, context)
        protected = selector.protected(total, context.budget, types).to(scores.device)
        index = selector.select(scores, caps, protected, types=types)

        def reduce(key: Tensor, value: Tensor, kept: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return reducer.reduce(key, value, kept, types)

        self.retain(index[None], reduce, reserve=max(start.reserve - (self.seen - start.seen), 0))

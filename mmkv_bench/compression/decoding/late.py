"""MEDA's released timing: the cache is reduced inside the first decode step, not at the end of the prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmkv_bench.compression.allocators.entropy import Entropy
from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.compression.scorers.text_prior import with_text_prior, without_text_prior
from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmkv_bench.compression.allocators.base import Allocator
    from mmkv_bench.compression.reducers.base import Reducer
    from mmkv_bench.compression.selectors.base import Selector


@dataclass(frozen=True)
class Late(DecodePolicy):
    """Decodes the answer's second token from the full cache, then reduces every layer by the method's own parts.

    With ``when=first_step``: while the answer's first token is fed, each layer attends to all T + 1 entries. That
    attention is added to the scores of the prefill (the new token has no other), and allocator, selector and reducer
    choose among the T + 1; the new token counts as text. So the first TWO tokens of an answer are the full cache's, and
    ``entries_resident`` of a row is the full cache; ``entries_end`` shows the reduction. Under ``strict`` the token that
    is fed again, and under ``query_agnostic`` the question, are among the candidates too, as text that only the first
    answer token has scored.

    Args:
        allocator, selector, reducer: the method's. The allocator decides layer by layer or by its summaries: when one
            layer is reduced, the others' new scores do not exist yet.
        when: "first_step", or "prefill_end": no policy at all, the prompt is reduced as by every other method.
        prior: the scores of the prefill carry a text prior (``TextPriorScorer``); it is taken off, the new attention
            added to the sums, and the prior given anew.

    Paper and code: MEDA's paper reduces at the end of the prefill; its release as here. The release would reduce a second
    time, by stale scores, once a reduced cache has grown to T + 1 again; not reproduced.
    """

    allocator: Allocator
    selector: Selector
    reducer: Reducer
    when: Literal["prefill_end", "first_step"] = "first_step"
    prior: bool = True

    tokens_from_full: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.when not in ("prefill_end", "first_step"):
            raise ConfigError(f"when is {self.when!r}; {nearest(str(self.when), ('prefill_end', 'first_step'))}")
        if not self.idle and self.allocator.scope == "model" and not isinstance(self.allocator, Entropy):
            raise ConfigError(
                f"{type(self.allocator).__name__} reads the scores of all layers, and in the first decode step they come "
                "one after the other; allowed: Entropy and allocators that decide layer by layer, or when=prefill_end"
            )

    @property
    def idle(self) -> bool:
        return self.when == "prefill_end"

    def layer(self, start: Start) -> WaitingLayer:
        return WaitingLayer.of(self, start)


@dataclass(frozen=True)
class Waiting:
    """What is still needed of a `Start` until the method reduces: nothing that keeps the original cache alive."""

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

    _policy: Late
    _start: Waiting | None

    @classmethod
    def of(cls, policy: Late, start: Start) -> WaitingLayer:
        import torch

        if start.scores is None:
            raise ConfigError(
                "reducing in the first decode step starts from the prefill's scores; give the method a scorer"
            )
        heads, n, _ = start.key.shape
        places = torch.arange(n, device=start.key.device).expand(heads, -1) + start.pad
        layer = cls.from_rows([(start.key, start.value, places)], start.seen, start.reserve)
        layer._policy = policy
        layer._start = Waiting(
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

    def _reduce(self, start: Waiting, query: Tensor, scaling: float) -> None:
        """Keep what the method keeps of everything stored. query: `[Hq, 1, D]` of the newest token."""
        import torch

        policy, total = self._policy, self.stored
        scores = column_sums(query, self.keys[0], scaling, total - 1)
        before, types = start.scores, start.context.types
        known = before.shape[1]
        if types is not None:
            types = torch.nn.functional.pad(types.to(scores.device), (0, total - len(types)))
        if policy.prior and types is not None and bool((types > 0).any()):
            scores[:, :known] += without_text_prior(before, types[:known])
            scores = with_text_prior(scores, types)
        else:
            scores[:, :known] += before
        context = Context(start.context.budget, total, 0, types, start.context.summaries)
        (caps,) = policy.allocator.caps([scores], context.budget, [start.layer], start.n_layers, context)
        protected = policy.selector.protected(total, context.budget, types).to(scores.device)
        index = policy.selector.select(scores, caps, protected, types=types)

        def reduce(key: Tensor, value: Tensor, kept: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return policy.reducer.reduce(key, value, kept, types)

        self.retain(index[None], reduce, reserve=max(start.reserve - (self.seen - start.seen), 0))

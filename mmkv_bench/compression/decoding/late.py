"""MEDA's released timing: the cache is reduced inside the first decode step, not at the end of the prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.entropy import Entropy
from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.selectors.base import Selector
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.compression.decoding.late_eviction_layer import WaitingLayer


@dataclass(frozen=True)
class Late(DecodePolicy):
    """A policy that decodes the first two answer tokens from the full cache and then reduces every layer.

    With ``when=first_step``: while the answer's first token is fed, each layer attends to all T + 1 entries. This
    attention is added to the scores of the prefill (the new token has no other), and allocator, selector and reducer
    choose among the T + 1 entries; the new token counts as text. ``entries_resident`` of a result row is the full
    cache; ``entries_end`` shows the reduction. Tokens fed before the answer are candidates too: under ``strict`` the
    token that is fed again, with its score of the prefill; under ``query_agnostic`` the question, as text that only the
    first answer token has scored.

    Args:
        allocator, selector, reducer: the method's parts. The allocator must decide layer by layer or by its summaries:
            when one layer is reduced, the new scores of later layers do not exist yet.
        when: "first_step", or "prefill_end": no policy, the prompt is reduced as by every other method.
        prior: the scores of the prefill include a text prior (``TextPriorScorer``), which is removed, and applied again
            after the new attention is added.

    Paper and code: MEDA's paper reduces at the end of the prefill, its release like this class. Not reproduced: a
    second reduction, by stale scores, once the cache has grown to T + 1 again.
    """

    allocator: Allocator
    selector: Selector
    reducer: Reducer
    when: Literal["prefill_end", "first_step"] = "first_step"
    prior: bool = True

    tokens_from_full: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_words(self)
        if not self.idle and self.allocator.scope == "model" and not isinstance(self.allocator, Entropy):
            raise ConfigError(
                f"{type(self.allocator).__name__} reads the scores of all layers, but in the first decode step "
                "layers are scored one after the other; allowed: Entropy and allocators that decide layer by "
                "layer, or when=prefill_end"
            )

    @property
    def idle(self) -> bool:
        return self.when == "prefill_end"

    def layer(self, start: Start) -> WaitingLayer:
        from mmkv_bench.compression.decoding.late_eviction_layer import WaitingLayer

        return WaitingLayer.of(start, self.allocator, self.selector, self.reducer, self.prior)

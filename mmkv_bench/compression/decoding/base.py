"""Interface of decode policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor

if TYPE_CHECKING:
    from mmkv_bench.compression.cache import CompressedCache, CompressedLayer


@dataclass
class Start:
    """One layer of ONE sequence right after the prompt (or context) was selected and reduced.

    Attributes:
        layer, n_layers: index of the layer, layers of the model.
        key, value: ``[Hkv, n, D]`` candidates of the full cache; only to be read, and gone afterwards unless copied.
        index: int64 ``[Hkv, m]`` kept candidates, ascending, LEFT-padded with -1.
        kept_key, kept_value: ``[Hkv, m, D]``, what the reducer made of them.
        scores: float32 or float64 ``[Hkv, prefilled]`` of this layer, T columns and those of a question that was scored with
            them; None when nothing was scored.
        context: the prompt, its budget and the allocator's summaries.
        pad: logical index of the prompt's first token (left padding). Slot positions are ``index + pad``.
        seen: tokens the layer counts as seen from now on: ``pad + n``, n the candidates.
        acts_from: logical index of the answer's first token. Tokens before it that are fed later (the last prompt token
            under ``strict``, the question where only the context is reduced) are stored like any other and trigger nothing.
        scaling: factor of the attention scores. reserve: slots of slack for new tokens. sinks: see ``Observation``.
    """

    layer: int
    n_layers: int
    key: Tensor
    value: Tensor
    index: Tensor
    kept_key: Tensor
    kept_value: Tensor
    scores: Tensor | None
    context: Context
    pad: int
    seen: int
    acts_from: int
    scaling: float
    reserve: int
    sinks: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """int64 ``[Hkv, m]`` logical index of every kept slot, -1 = padding."""
        return (self.index + self.pad).masked_fill(self.index < 0, -1)

    def room_until_evicting(self, over: int) -> int:
        """Slots to reserve where every token of the answer costs an entry: `over` of them come before one goes."""
        return min(self.reserve, self.acts_from - self.seen + over)


class DecodePolicy(ABC):
    """Builds the layers that an answer is decoded from; they carry the policy's state (``CompressedLayer``'s hooks).

    Policies hold one sequence each. They do not act on prompts within their budget, whose cells borrow the full cache,
    unless they quantise.

    Class attributes:
        quantises: entries are stored in fewer bits, those of a prompt within its budget too.
        retrieves: entries that are not on the device can be read later.
        idle: with these parameters nothing happens while decoding; the method runs as if it had no policy.
        moves_queries: ``query_positions`` is overridden; such forks decode alone.
        tokens_from_full: so many tokens of an answer are the full cache's, whatever the protocol.

    A subclass sets them in its class, or as properties where they depend on its parameters.
    """

    quantises: ClassVar[bool] = False
    retrieves: ClassVar[bool] = False
    tokens_from_full: ClassVar[int] = 0

    @property
    def idle(self) -> bool:
        return False

    @property
    def moves_queries(self) -> bool:
        return False

    @abstractmethod
    def layer(self, start: Start) -> CompressedLayer:
        """The layer that takes the place of the full one."""

    def method_version(self, method: Composed) -> int:
        """Version of the results that this part produces, from 1; see ``Scorer.method_version``."""
        return 1

    def fallbacks(self, entries: int) -> tuple[str, ...]:
        """Names of what could not be done as the parameters ask with so many entries per KV head; see
        ``Scorer.fallbacks``."""
        return ()

    def query_positions(self, cache: CompressedCache, position_ids: Tensor) -> Tensor:
        """Position ids ``[3|4, 1, n]`` or ``[1, n]`` that the model shall use instead of the true ones: only to reproduce
        a released code that errs there."""
        return position_ids

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
    """State of one layer of ONE sequence when decoding starts, after the entries were selected and reduced.

    Attributes:
        layer: index of the layer.
        n_layers: number of layers of the model.
        key, value: ``[Hkv, n, D]`` candidates of the full cache; read-only, and freed later unless the policy copies
            them.
        index: int64 ``[Hkv, m]`` kept candidates, ascending, LEFT-padded with -1.
        kept_key, kept_value: ``[Hkv, m, D]``, the reducer's result.
        scores: float32 or float64 ``[Hkv, prefilled]``, one column per prefilled token; a question that is prefilled
            with the context has the last columns. None if nothing was scored.
        context: the prompt, its budget and the allocator's summaries.
        pad: logical index of the prompt's first token (left padding). Slot positions are ``index + pad``.
        seen: number of tokens that the layer counts as seen from now on: ``pad + n`` for n candidates.
        acts_from: logical index of the answer's first token. Prompt tokens that are fed before the answer (the last
            token under ``strict``, the question if only the context is reduced) are stored and trigger no eviction.
        scaling: factor of the attention scores.
        reserve: slots of slack for new tokens.
        sinks: see ``Observation``.
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
        """Logical index of every kept slot, int64 ``[Hkv, m]``, -1 = padding."""
        return (self.index + self.pad).masked_fill(self.index < 0, -1)

    def room_until_evicting(self, over: int) -> int:
        """Return the slots to reserve for a policy that evicts one entry per answer token after the first `over`."""
        return min(self.reserve, self.acts_from - self.seen + over)


class DecodePolicy(ABC):
    """A rule for the entries while an answer is decoded: it builds layers that act in ``CompressedLayer``'s hooks.

    Such a layer holds one sequence. A prompt within its budget is decoded from the full cache, without the policy,
    unless the policy quantises.

    Class attributes:
        quantises: entries are stored in fewer bits, also for a prompt within its budget.
        retrieves: entries that are not on the device can be read later.
        idle: with these parameters the policy does nothing, and the method runs as if it had none.
        moves_queries: ``query_positions`` is overridden; answers are then decoded one by one, not in a batch.
        tokens_from_full: number of first answer tokens that come from the full cache, whatever the protocol.

    A subclass sets these attributes, or defines properties if they depend on its parameters.
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
        """Build the layer that acts by this policy and replaces a layer of the full cache."""

    def method_version(self, method: Composed) -> int:
        """Return the version of this part's results; see ``Scorer.method_version``."""
        return 1

    def fallbacks(self, entries: int) -> tuple[str, ...]:
        """Return names of what cannot be done as configured with `entries` per KV head; see ``Scorer.fallbacks``."""
        return ()

    def query_positions(self, cache: CompressedCache, position_ids: Tensor) -> Tensor:
        """Return the position ids that the model uses instead of ``position_ids`` (``[3|4, 1, n]`` or ``[1, n]``).

        They differ only for policies that reproduce a released code's wrong positions.
        """
        return position_ids

"""Interface of allocators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Literal

from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation


class Allocator(ABC):
    """A rule that divides a budget among layers and KV heads.

    Class attributes:
        scope: "layer": a layer's budget is divided as soon as the layer is prefilled, so peak memory falls during the
            prefill. "model": the division needs the scores of all layers, so it follows the last layer.
        excess: entries per KV head granted above the budget, as some released codes do.
        needs: statistics of a layer that ``summary`` reads.
        needs_visual: prompts without visual tokens are refused.
        exceeds: the model may be granted more than its budget with these parameters.
        printed: ``exceeds`` follows from the paper's own formula. Then it is allowed under ``reading=paper`` too, and
            marked in rows and tables.
        falls_short: the model may be granted less than its budget with these parameters.
        reads_fraction: a budget requested as a fraction is used as this fraction (``Context.asked``), not as C / T.
        streams: all KV heads of all layers get the same number of entries, at most the budget, as ``protocol=stream``
            demands.
        follows_prompt: a head's number of entries depends on the prompt's content and the weights, not on its length
            alone. Then times and bytes measured with random weights do not hold for trained ones.

    A subclass sets these attributes, or defines properties if they depend on its parameters.
    """

    excess: int = 0
    needs_visual: bool = False
    printed: bool = False

    @property
    def streams(self) -> bool:
        return False

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "layer"

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def exceeds(self) -> bool:
        return False

    @property
    def falls_short(self) -> bool:
        return False

    @property
    def reads_fraction(self) -> bool:
        return False

    @property
    def follows_prompt(self) -> bool:
        return True

    def summary_key(self, budget: int, length: int) -> Hashable | None:
        """Return the parameters on which ``summary`` depends at this budget and length; None if there is no summary.

        Methods whose allocators have the same type and key share one summary per layer.
        """
        return None

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor | None:
        """Return statistics of a layer, float64 ``[k]`` or ``[Hkv, k]`` on the CPU; None: scores are enough."""
        return None

    def method_version(self, method: Composed) -> int:
        """Return the version of this part's results; see ``Scorer.method_version``."""
        return 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return names of what cannot be done as configured; see ``Scorer.fallbacks``."""
        return ()

    def outcome(self, context: Context) -> tuple[str, ...]:
        """Return the fallbacks that are known only after the budget was divided, from the summaries of all layers."""
        return ()

    @abstractmethod
    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        """Return the entries per KV head for each given layer.

        Args:
            scores: per layer, float32 or float64 ``[Hkv, n]`` for n candidates (one layer for scope "layer", all for
                "model").
            budget: entries per KV head on average, sinks, window and last token included; may be 0.
            layers: indices of the layers that ``scores`` belong to.
            n_layers: layers of the model.
            context: the prompt and the layers' summaries; None is enough for allocators that read scores only.

        Returns:
            Per layer int64 ``[Hkv]`` on the CPU, each at most n, with a sum of at most
                ``(budget + excess) * Hkv * len(scores)`` and exactly that if n exceeds ``budget + excess``, except
                where ``exceeds`` or ``falls_short``. An allocator of scope "layer" that divides the budget among
                layers keeps to its ``allowance`` instead.
        """

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        """Return the most entries per KV head, on average, that the given layers may hold together.

        It is known before any score: ``budget * len(layers)``, unless an allocator of scope "layer" divides the budget
        among layers. For all layers of the model, an allocator that does not exceed its budget returns at most
        ``budget * n_layers``.

        Args:
            budget, layers, n_layers: see ``caps``.
            candidates: n.
        """
        return budget * len(layers)


def same_in_heads(scores: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return caps that give all KV heads of a layer the same number of entries. counts: this number for each layer."""
    return [torch.full((len(score),), count, dtype=torch.int64) for score, count in zip(scores, counts, strict=True)]

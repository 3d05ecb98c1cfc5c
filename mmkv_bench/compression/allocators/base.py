"""Interface of allocators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Literal

from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation


class Allocator(ABC):
    """Divides a budget among layers and KV heads.

    Class attributes:
        scope: "layer" decides each layer at once, so peak memory falls during prefill; "model" needs the scores of all
            layers and decides after the last one.
        excess: entries per KV head granted ABOVE the budget. It is 0 in every paper reading; a released code that
            stores more than it states declares its excess here, so that a plan and an audit can name it.
        needs: what ``summary`` reads of a layer.
        needs_visual: prompts without visual tokens cannot be allocated.
        exceeds: with these parameters the model may be granted more than its budget, as a released code does. False in
            every paper reading.
        printed: what ``exceeds`` tells is the paper's own formula and no released code's: allowed in either reading, and
            marked in rows and tables.
        falls_short: with these parameters it may be granted less: controls, a granularity, releases.
        reads_fraction: of a budget that is asked for as a fraction it reads the fraction itself (``Context.asked``), not C / T.
        streams: every KV head of every layer keeps as many entries, at most the budget, as a stream's cap demands.
        follows_prompt: how many entries a head gets follows from what the prompt and the weights are, not from the prompt's
            length alone, so that times and bytes with random weights are those of another division.

    A subclass sets them in its class, or as properties where they depend on its parameters.
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
        """Effective parameters of ``summary`` at this budget and length; None for allocators that read scores only.

        Cells whose allocators have the same type and key share one summary per layer.
        """
        return None

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor | None:
        """A layer's own figures, small (``[k]`` or ``[Hkv, k]``), float64 on the CPU; kept until the prompt is reduced."""
        return None

    def method_version(self, method: Composed) -> int:
        """Version of this part's numbers, from 1; see ``Scorer.method_version``."""
        return 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Names of what could not be done as configured; see ``Scorer.fallbacks``."""
        return ()

    def outcome(self, context: Context) -> tuple[str, ...]:
        """Further fallbacks, known from the summaries of all layers once the budget was divided."""
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
        """Entries per KV head for each given layer.

        Args:
            scores: per layer, float32 or float64 ``[Hkv, n]`` for n candidates (one layer for scope "layer", all for "model").
            budget: entries per KV head on average, sinks, window and last token included; may be 0.
            layers: indices of the layers that ``scores`` belong to.
            n_layers: layers of the model.
            context: the prompt and the layers' summaries; allocators that read scores only need none.

        Returns:
            Per layer int64 ``[Hkv]`` on the CPU, each at most n, with a sum of at most
            ``(budget + excess) * Hkv * len(scores)`` and exactly that when n exceeds ``budget + excess``. An allocator
            that divides the budget among layers keeps to its ``allowance`` instead.
        """

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        """Sum over the given layers of the entries that one KV head may hold, before any score is known.

        Args:
            budget, layers, n_layers: see ``caps``; candidates: n.

        Returns:
            ``budget * len(layers)``; an allocator of scope "layer" whose layers differ returns its own share, which must
            be at most ``budget * n_layers`` over all layers.
        """
        return budget * len(layers)


def same_in_heads(scores: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return caps by which all KV heads of a layer get the same number; counts: one per layer of ``scores``."""
    return [torch.full((len(score),), count, dtype=torch.int64) for score, count in zip(scores, counts, strict=True)]

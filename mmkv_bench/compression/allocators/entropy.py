"""MEDA: layers whose attention between text and image is spread out get more entries."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import exp
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.allocators.waterfill import water_fill
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.entropy import causal_entropy, cross_modal_entropy
from mmkv_bench.compression.numerics.exact import exact_decimal
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.errors import ConfigError

UNDEFINED = 0.0  # the entropy of a prompt of one modality: equal in all layers, so the budget is uniform


@dataclass(frozen=True)
class Entropy(Allocator):
    """MEDA (arXiv 2502.17599, eq. 4 to 7): layer l gets ``softmax(E)_l * L * C`` entries per KV head.

    ``E_l`` is the cross-modal attention entropy of the layer (``numerics/entropy.py``). Shares above the prompt's
    length, of which the paper says nothing, are clipped, and the other layers divide the excess in proportion
    (water-filling). Whole entries come from the largest remainder, so the model holds exactly ``C * L`` entries per KV
    head. All entropies must be known first, so peak memory is the full cache's. A prompt of one modality has no
    cross-modal map: every layer gets C (fallback ``single_modality`` or ``no_visual_tokens``).

    Args:
        entropy: "cross_modal": the entropy of the two attention maps between modalities, each averaged over heads
            first; "full": the mean entropy of the causal attention rows of all heads.
        clamp: "none", or "released": shares are clamped to [0.01, 1] of the candidates and rounded down, and the excess
            is lost, so the total differs from the budget.
        rho: fraction of the candidates that is kept instead of the budget; 0 = the budget.
        dynamic: false gives every layer the same number of entries (MEDA's ablation, table 5).

    Paper and code (``reading=released``): the release computes ``entropy=full`` and ``clamp=released``, with a fixed
    ``rho`` of 0.2 where the paper reports 0.1 on MileBench. Not reproduced: float16 entropies that become NaN.
    """

    entropy: Literal["cross_modal", "full"] = "cross_modal"
    clamp: Literal["none", "released"] = "none"
    rho: float = 0.0
    dynamic: bool = True

    def __post_init__(self) -> None:
        check_words(self)
        if not 0 <= self.rho <= 1:
            raise ConfigError(f"rho is {self.rho}; allowed: 0 (the cell's budget) or a fraction kept, 0 < rho <= 1")

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "model" if self.dynamic else "layer"

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.dynamic)

    @property
    def exceeds(self) -> bool:
        return self.rho > 0 or self.clamp == "released"

    falls_short = exceeds

    # ---- one layer

    def summary_key(self, budget: int, length: int) -> Hashable | None:
        return (self.entropy,) if self.dynamic else None

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor | None:
        """Return the attention entropy of the layer [nats], ``[1]``."""
        if not self.dynamic:
            return None
        if self.entropy == "full":
            entropy = causal_entropy(obs.queries, obs.key, obs.scaling, obs.sinks, obs.reach)
        elif obs.token_types is None or _modalities(obs.token_types) < 2:
            entropy = UNDEFINED
        else:
            entropy = cross_modal_entropy(obs.queries, obs.key, obs.scaling, obs.token_types)
        return torch.tensor([entropy], dtype=torch.float64)

    # ---- all layers

    def layer_caps(self, entropies: Sequence[float], budget: int, candidates: int) -> list[int]:
        """Return the entries per KV head of every layer of the model, from the entropies of all layers [nats]."""
        mean = exact_decimal(self.rho) * candidates if self.rho else Fraction(budget)
        highest = max(entropies)
        weights = [exp(value - highest) for value in entropies]
        if self.clamp == "none":
            return water_fill(weights, min(int(mean), candidates) * len(entropies), candidates)
        total = sum(map(Fraction, weights))
        shares = [Fraction(weight) / total * len(entropies) * mean for weight in weights]
        return [int(min(max(share, Fraction(candidates, 100)), Fraction(candidates))) for share in shares]

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        candidates = scores[0].shape[1]
        entropies = [UNDEFINED] * n_layers
        if self.dynamic:
            if context is None:
                raise ValueError("the layers' entropies are missing; give the context with their summaries")
            entropies = [float(context.summaries[i]) for i in range(n_layers)]
        layer_budgets = self.layer_caps(entropies, budget, candidates)
        return same_in_heads(scores, [layer_budgets[layer] for layer in layers])

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        if not self.dynamic or self.entropy == "full" or _modalities(types) == 2:
            return ()
        return ("single_modality",) if types is not None and bool((types > 0).any()) else ("no_visual_tokens",)


def _modalities(types: Tensor | None) -> int:
    """Count the modalities of a prompt, 1 or 2: text, and images or videos. Unknown types count as text."""
    return 1 if types is None else len({bool(kind > 0) for kind in types.unique()})

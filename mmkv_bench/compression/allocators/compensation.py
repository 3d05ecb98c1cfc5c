"""MadaKV: a layer that needs more entries than its share takes them from later layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.errors import ConfigError

ROUNDING = 1e-12  # tolerance of float64 sums, so that equal masses meet theta exactly


@dataclass(frozen=True)
class Compensation(Allocator):
    """MadaKV's hierarchical compression compensation (arXiv 2506.15724), layer after layer during the prefill.

    A KV head needs ``k_v + k_t`` entries: the fewest visual and the fewest text tokens that hold the share theta of
    their modality's attention mass. Layer l starts with ``phi_l`` entries per KV head, where ``phi_1 = C``. Later
    layers settle the difference ``K_l = sum_h (k_v + k_t - phi_l)``: ``phi_{l+1} = phi_l - K_l / (L - l)``. K_l is
    divided by H, because phi is per head. All heads of a layer get the same cap, rounded to the nearest whole entry,
    from 1 (0 if C is 0) to n.

    Args:
        theta: share of a modality's mass that its tokens must cover, in (0, 1].
        proxies: number of last queries whose attention is measured; equal to ``proxies`` of ``TailMassScorer``.
        carry: the entries that a layer gets. "granted": ``phi_l + K_l / H``, the entries that its heads need on
            average; the last layer takes what is left, so the total is exactly ``L * C``. "printed": phi_l, as the
            formulas say by themselves. Then later layers pay for entries that no layer has, or gain entries that no
            layer gave; the total is cut at ``L * C`` and may stay below it.

    No code was found. Open or contradictory in the paper, by third-party notes, and chosen here: theta, the units of
    K_l, and ``carry``.
    """

    theta: float = 0.9
    proxies: int = 32
    carry: Literal["granted", "printed"] = "granted"

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 1, "tokens", "proxies")
        if not 0 < self.theta <= 1:
            raise ConfigError(f"theta is {self.theta}; allowed: a share of the attention mass, 0 < theta <= 1")

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.proxies)

    @property
    def falls_short(self) -> bool:
        return self.carry == "printed"

    def summary_key(self, budget: int, length: int) -> Hashable | None:
        return (self.theta, min(self.proxies, length))

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor | None:
        """Return how many entries each KV head needs, ``k_v + k_t``, ``[Hkv]``. Unknown token types count as text."""
        mass = obs.window_mass(min(self.proxies, obs.length))
        visual = torch.zeros(obs.length, dtype=torch.bool) if obs.token_types is None else obs.token_types != 0
        visual = visual.to(mass.device)
        return (self._cover(mass[:, visual]) + self._cover(mass[:, ~visual])).double().cpu()

    def _cover(self, mass: Tensor) -> Tensor:
        """Return the least number of columns that hold theta of each row's sum, int64 ``[Hkv]``. mass: ``[Hkv, m]``."""
        if mass.shape[1] == 0:
            return torch.zeros(len(mass), dtype=torch.int64, device=mass.device)
        reached = mass.sort(-1, descending=True).values.double().cumsum(-1)
        needed_entries = torch.searchsorted(reached, self.theta * (1 - ROUNDING) * reached[:, -1:]).squeeze(-1) + 1
        return torch.where(reached[:, -1] > 0, needed_entries, 0)

    def layer_caps(self, needs: Sequence[Fraction], budget: int, candidates: int, n_layers: int) -> list[int]:
        """Return the entries per KV head of the first ``len(needs)`` layers.

        needs: for each layer, the mean number of entries that its heads need.
        """
        if budget >= candidates:
            return [candidates] * len(needs)
        floor, remaining_budget, phi, caps = min(1, budget), budget * n_layers, Fraction(budget), []
        for layer, needed_entries in enumerate(needs):
            later = n_layers - 1 - layer
            if self.carry == "granted":
                target_cap = needed_entries if later else Fraction(remaining_budget)
                least = max(floor, remaining_budget - later * candidates)
            else:
                target_cap, least = phi, floor
                if later:
                    phi = min(max(phi - (needed_entries - phi) / later, Fraction(1)), Fraction(candidates))
            largest_cap = min(candidates, remaining_budget - later * floor)
            caps.append(min(max(int(target_cap + Fraction(1, 2)), least), largest_cap))
            remaining_budget -= caps[-1]
        return caps

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        # Known only once the earlier layers have been seen: one layer may take the budget of all.
        return min(budget * n_layers, candidates * len(layers))

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        summaries: Mapping[int, Tensor] = {} if context is None else context.summaries
        layers_until_here = range(max(layers) + 1)
        missing = [layer for layer in layers_until_here if layer not in summaries]
        if missing:
            raise ValueError(f"the needs of layer {missing[0]} are missing; give the summaries of all layers so far")
        needs = [
            sum(map(Fraction, summaries[layer].tolist()), Fraction(0)) / len(summaries[layer])
            for layer in layers_until_here
        ]
        caps = self.layer_caps(needs, budget, scores[0].shape[1], n_layers)
        return same_in_heads(scores, [caps[layer] for layer in layers])

"""FlashCache: layers whose keys and values vary faster along the prompt get more entries."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.allocators.waterfill import water_fill
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.compression.scorers.deviation import check_gamma, cutoff, filter_needs, high_pass_parts


@dataclass(frozen=True)
class Spectral(Allocator):
    """FlashCache's dynamic budget allocation (paper section 3.2.2, equations 11 and 12).

    With ``P[m]`` the energy of bin m, summed over the channels of a layer's keys,
    ``R_k = sum_{m > omega} P[m] / sum_m P[m]``. R_v is the same for values, and ``R_l = R_k + R_v``. As in the paper,
    bin omega counts neither as base nor as outlier. Each KV head of a layer gets ``R_l / sum R * L * C`` entries, at
    most n. The other layers divide the excess in proportion (water-filling), and largest-remainder rounding makes the
    total exactly ``L * C``. A layer may get 0 entries.

    All layers must have been seen, so peak memory equals the full cache's. The transform is shared with the scorer.

    Args:
        gamma, keys: the low-pass filter of ``DeviationScorer``; give both the same.
        dba: false is the paper's ablation without the module (Table 7): C entries everywhere, decided layer by layer.

    No code was released. Open in the paper and chosen here: shares above n (water-filling), and 0 / 0: a layer whose
    keys (or values) are all zero adds no ratio, and layers without any outlier energy at all share equally.
    """

    gamma: float = 0.2
    keys: Literal["cached", "unrotated"] = "cached"
    dba: bool = True

    def __post_init__(self) -> None:
        check_words(self)
        check_gamma(self.gamma)

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "model" if self.dba else "layer"

    @property
    def needs(self) -> Needs:
        return filter_needs(self.keys) if self.dba else Needs()

    def summary_key(self, budget: int, length: int) -> Hashable | None:
        return (cutoff(self.gamma, length), self.keys) if self.dba else None

    def summary(self, obs: Observation, budget: int, seed: int) -> Tensor | None:
        """Return R_k and R_v of a layer, ``[2]``."""
        if not self.dba:
            return None
        parts = high_pass_parts(obs, self.gamma, self.keys)
        outlier = torch.stack([part.outlier.sum() for part in parts])
        total = torch.stack([part.total.sum() for part in parts])
        return outlier / total.masked_fill(total == 0, 1)

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        if not self.dba:
            return Uniform().caps(scores, budget, layers, n_layers)
        if context is None or any(layer not in context.summaries for layer in layers):
            raise ValueError(
                f"layers {list(layers)} share a budget by their spectra, but summaries are missing; give a summary "
                "of each of these layers"
            )
        candidates = scores[0].shape[1]
        weights = [float(context.summaries[layer].sum()) for layer in layers]
        shares = water_fill(weights, min(budget, candidates) * len(layers), candidates)
        return same_in_heads(scores, shares)

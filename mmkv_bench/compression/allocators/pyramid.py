"""PyramidKV: many entries for the first layers, few for the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.allocators.waterfill import largest_remainder
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import effective_window
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class Pyramid(Allocator):
    """PyramidKV (arXiv 2406.02069): caps fall linearly from the first layer to the last.

    With n candidates, C entries per KV head and w of them for the observation window, ``base = C - w`` remain on
    average. The last layer gets ``low = base / beta`` and the first ``high = 2 * base - low``. If a prompt is so short
    that ``high > n - w``, then ``high = n - w`` and ``low = 2 * base - high``. Layer l (from 0) gets
    ``high - l * (high - low) / (L - 1) + w`` entries per KV head, so the model holds exactly C on average. Caps depend
    on the prompt's length alone.

    Args:
        window: w [tokens], ``min(w, max(1, C // 2), n)`` of them, given to every layer first; equal to the selector's
            window.
        beta: base, the average share, over the last layer's share, 1 or more. 1 is the uniform budget.
        step: "real": exact shares, rounded by largest remainder; "floored", under ``reading=released`` alone: ``low``
            and the step between layers are rounded down, so the total may be above the budget.
        frozen: prompt length [tokens] whose caps are used for all prompts, 0 = each prompt's own. With ``step=floored``
            only, because shares of another prompt do not add up to the budget.

    Paper and code (``reading=released``): with ``step=floored``, as in the PyramidKV, AdaKV, SparseMM and MM-ShiftKV
    releases, the average cap is above the budget by less than (L - 1) / 2 entries: 68.0 instead of 64 in 28 layers.
    ``excess`` stays 0, because this depends on budget and prompt. The last three releases also freeze the caps at the
    first prompt that the process sees; only ``frozen=T`` reproduces that, for a first prompt of T tokens. Not
    reproduced: PyramidKV's release takes the uniform budget if ``C <= T < 2 * (C - w)``.
    """

    window: int = 32
    beta: int = 20
    step: Literal["real", "floored"] = "real"
    frozen: int = 0

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "tokens", "window")
        check_least(self, 1, "", "beta")
        if self.frozen < 0 or (self.frozen and self.step == "real"):
            raise ConfigError(
                f"frozen is {self.frozen} with step={self.step}; allowed: 0, or a prompt length with step=floored"
            )

    @property
    def exceeds(self) -> bool:
        return self.step == "floored"

    falls_short = exceeds

    def layer_caps(self, budget: int, candidates: int, n_layers: int) -> list[int]:
        """Return the entries per KV head of every layer of the model, window included."""
        window = min(effective_window(self.window, budget, candidates), budget) if self.window else 0
        base = budget - window
        if budget >= candidates:
            return [candidates] * n_layers
        if n_layers == 1:
            return [budget]
        largest_cap = (self.frozen or candidates) - window
        if self.step == "floored":
            lowest_cap = base // self.beta
            highest_cap = 2 * base - lowest_cap
            if highest_cap >= largest_cap:
                highest_cap, lowest_cap = largest_cap, 2 * base - largest_cap
            cap_step = (highest_cap - lowest_cap) // (n_layers - 1)
            return [min(max(0, highest_cap - layer * cap_step) + window, candidates) for layer in range(n_layers)]
        last = Fraction(base, self.beta)
        first = 2 * base - last
        if first > largest_cap:
            first, last = Fraction(largest_cap), Fraction(2 * base - largest_cap)
        step = (first - last) / (n_layers - 1)
        return [count + window for count in largest_remainder([first - layer * step for layer in range(n_layers)])]

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        caps = self.layer_caps(budget, candidates, n_layers)
        return sum(caps[layer] for layer in layers)

    @property
    def follows_prompt(self) -> bool:
        return False

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        caps = self.layer_caps(budget, scores[0].shape[1], n_layers)
        return same_in_heads(scores, [caps[layer] for layer in layers])

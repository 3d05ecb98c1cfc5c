"""PrefixKV: every layer keeps its best entries, as many as hold a common share of the layer's importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.allocators.waterfill import largest_remainder
from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.numerics.prefix import interpolate_ratios, prefix_curves, scale_to, search
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.errors import CalibrationError, ConfigError, UnsupportedError

LEAST = 2  # entries that every layer keeps: the first and the last token
_ADVICE = "make a profile of this model with python -m mmkv_bench calibrate prefixkv, or use mode=online"


@dataclass(frozen=True)
class Prefix(Allocator):
    """PrefixKV (arXiv 2412.03409, section 3.3, equation 1, algorithm 1): one threshold p of cumulative importance.

    With n candidates, C entries per KV head and ``rho = C / n``, layer l keeps the fraction
    ``R_l = min{o : P_l[o] >= p}``. ``P_l`` is the cumulative sum of the layer's importance (mean of the scores over KV
    heads, sorted descending, normalised to 1). A binary search finds the p with ``sum R_l = L * rho``. One common
    factor on all ``R_l`` corrects the total that the search missed; no ``R_l`` goes above 1 or below two entries (or C,
    if that is less). Whole entries come from the largest remainder. All KV heads of a layer get the same cap.

    Args:
        mode: "offline": ``R_l`` comes from a profile, and a layer is reduced as soon as it is prefilled (scope
            "layer"). "online": the scores of the prompt are searched after the last layer (scope "model"); needs scores
            >= 0.
        calibration: the profile for "offline", ``{"grid": [rho, ...], "ratios": [[R_l of every layer], ...]}``: mean
            ``R_l`` of sample prompts for each budget of an ascending grid in (0, 1], linear in rho between budgets,
            with ``R_l = 0`` at 0 and ``R_l = 1`` at 1. Made by ``python -m mmkv_bench calibrate prefixkv``. In a
            configuration ``auto`` or a path; the allocator can divide a budget only after the profile is loaded.
        delta: ``|sum R_l - L * rho|`` at which the online search stops [layers] (table 10); 0 = exact, or until p has
            no more digits. The default is the smallest that the paper tries.
        steps: more than 0: at most this many halvings of the online search instead of delta (table 11); 0 = delta
            decides.
        rounding: "remainder": exact totals; "nearest", as released: the evicted count ``(1 - R_l) * n`` of each layer
            is rounded separately, halves to the even number. Under "offline" the profile is then used at the requested
            fraction, without the common factor. A model may hold up to L / 2 entries per KV head more or fewer than its
            budget, plus the error of the profile's ratios, so this is allowed under ``reading=released`` alone.

    Paper and code: the release reads evicted fractions per layer from one file for each model and budget and rounds
    each of them separately (``reading=released``). They need not add up to the budget in the file's name. Not
    reproduced: the release's search per sample stops within 5 tokens of the total, counts two protected entries in
    addition to each prefix, and scales the EVICTED counts and rounds them down. Here the kept ratios are scaled, as the
    paper's text says.
    """

    calibrated_by = "prefixkv"

    mode: Literal["offline", "online"] = "offline"
    calibration: Mapping[str, Any] | str | None = None
    delta: float = 0.0125
    steps: int = 0
    rounding: Literal["remainder", "nearest"] = "remainder"

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "layers", "delta")
        if self.steps < 0:
            raise ConfigError(f"steps is {self.steps}; allowed: 0 (stop by delta) or more halvings")
        if isinstance(self.calibration, Mapping):
            _validate_profile(self.calibration)
        elif self.mode == "offline" and self.calibration is None:
            raise CalibrationError(f"mode=offline without a calibration: {_ADVICE}")

    def method_version(self, method: Composed) -> int:
        """Return 2 if the profile is used without scaling, as released; else 1."""
        return 2 if self._as_released else 1

    @property
    def _as_released(self) -> bool:
        return self.rounding == "nearest" and self.mode == "offline"

    @property
    def reads_fraction(self) -> bool:
        return self._as_released

    @staticmethod
    def needs_calibration(parameters: Mapping[str, Any]) -> bool:
        """Tell whether an allocator with these parameters reads a profile."""
        return parameters.get("mode", "offline") == "offline"

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "layer" if self.mode == "offline" else "model"

    @property
    def exceeds(self) -> bool:
        return self.rounding == "nearest"

    falls_short = exceeds

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        if self.mode == "online":
            return super().allowance(budget, candidates, layers, n_layers)
        counts = self._counts_from_profile(budget, candidates, n_layers)
        return sum(counts[layer] for layer in layers)

    @property
    def follows_prompt(self) -> bool:
        return self.mode == "online"

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        n = scores[0].shape[1]
        if self.mode == "offline":
            counts = self._counts_from_profile(budget, n, n_layers, context)
            counts = [counts[layer] for layer in layers]
        else:
            counts = self._search_counts(scores, budget, n)
        return same_in_heads(scores, counts)

    def _search_counts(self, scores: Sequence[Tensor], budget: int, n: int) -> list[int]:
        if budget >= n or budget == 0:
            return [min(budget, n)] * len(scores)
        if any(bool((score < 0).any()) for score in scores):
            raise UnsupportedError(
                "PrefixKV's search adds up importance, but this scorer gives negative scores; allowed: scorers "
                "that give 0 or more (layer_mean, column_sums, window), or another allocator"
            )
        curves = prefix_curves([score.double().mean(0) for score in scores])
        total = len(scores) * budget
        counts, _ = search(curves, Fraction(total), self.delta, self.steps)
        return _whole([Fraction(count) for count in counts], budget, n, self.rounding)

    @cached_property
    def _profile(self) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
        if not isinstance(self.calibration, Mapping):
            raise CalibrationError(
                f"calibration={self.calibration} was not loaded, because no model is known: {_ADVICE}"
            )
        return _validate_profile(self.calibration)

    def _counts_from_profile(self, budget: int, n: int, n_layers: int, context: Context | None = None) -> list[int]:
        grid, ratios = self._profile
        if len(ratios[0]) != n_layers:
            raise CalibrationError(
                f"the PrefixKV profile has ratios of {len(ratios[0])} layers, but the model has {n_layers}: {_ADVICE}"
            )
        if self._as_released and context is not None and context.asked is not None:
            return _released_counts(grid, ratios, context)
        return list(_profile_counts(grid, ratios, min(budget, n), n, self.rounding))


@lru_cache(maxsize=64)
def _profile_counts(
    grid: tuple[float, ...], ratios: tuple[tuple[float, ...], ...], budget: int, n: int, rounding: str
) -> tuple[int, ...]:
    if budget in (0, n):
        return (budget,) * len(ratios[0])
    weights = interpolate_ratios(grid, ratios, Fraction(budget, n))
    if rounding == "nearest":  # the release uses its file without scaling
        return tuple(_round_evicted_counts([weight * n for weight in weights], n, min(LEAST, budget)))
    return tuple(_whole(weights, budget, n, rounding))


def _released_counts(grid: tuple[float, ...], ratios: tuple[tuple[float, ...], ...], context: Context) -> list[int]:
    """Return the entries of every layer as the release computes them, from a profile with ``grid`` and ``ratios``.

    The requested fraction is of all T tokens, and the tokens that will be fed again are subtracted.
    """
    assert context.asked is not None, "of a budget that is a fraction"
    n, least = context.length, min(LEAST, context.budget)
    counts = _round_evicted_counts([weight * n for weight in interpolate_ratios(grid, ratios, context.asked)], n, least)
    return [count - context.refed for count in counts]


def _whole(weights: list[Fraction], budget: int, n: int, rounding: str) -> list[int]:
    """Divide a budget among layers in proportion to weights; return the whole entries of every layer.

    budget: entries per layer on average (0 < budget < n). n: candidates. rounding: parameter of ``Prefix``.
    """
    least = min(LEAST, budget)
    shares = scale_to(weights, Fraction(len(weights) * budget), Fraction(n), Fraction(least))
    return _round_evicted_counts(shares, n, least) if rounding == "nearest" else largest_remainder(shares)


def _round_evicted_counts(shares: list[Fraction], n: int, least: int) -> list[int]:
    """Round each layer's evicted count, halves to the even number; return the kept entries of every layer.

    shares: exact kept entries of each layer. n: candidates. least: smallest result.
    """
    return [max(n - round(n - share), least) for share in shares]


def _validate_profile(calibration: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Return (grid, ratios) of a profile as nested tuples. Raise CalibrationError if these are not valid."""
    if not {"grid", "ratios"} <= set(calibration):
        raise CalibrationError(f"the PrefixKV profile has no grid or no ratios: {_ADVICE}")
    grid = tuple(float(rho) for rho in calibration["grid"])
    ratios = tuple(tuple(float(ratio) for ratio in row) for row in calibration["ratios"])
    if not grid or list(grid) != sorted(set(grid)) or not 0 < grid[0] <= grid[-1] <= 1:
        raise CalibrationError(f"the profile's grid is {list(grid)}; allowed: rising fractions in (0, 1]: {_ADVICE}")
    if len(ratios) != len(grid) or len({len(row) for row in ratios}) != 1 or not ratios[0]:
        raise CalibrationError(
            f"the profile has {len(ratios)} rows of ratios for {len(grid)} budgets; allowed: one row each"
        )
    if not all(0 <= ratio <= 1 for row in ratios for ratio in row):
        raise CalibrationError(f"the PrefixKV profile has ratios outside of [0, 1]: {_ADVICE}")
    return grid, ratios

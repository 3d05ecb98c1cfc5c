"""SparseMM: heads that read images get a larger part of the cache; the heads' scores are measured beforehand."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from mmkv_bench.compression.allocators.base import Allocator, same_in_heads
from mmkv_bench.compression.allocators.waterfill import water_fill
from mmkv_bench.compression.context import Composed, Context
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.exact import exact_decimal
from mmkv_bench.compression.observation import effective_window
from mmkv_bench.compression.parameter_checks import check_least, check_share, check_words
from mmkv_bench.errors import CalibrationError, ConfigError


@dataclass(frozen=True)
class HeadScores(Allocator):
    """SparseMM (arXiv 2506.05344): every head of the whole model gets entries in proportion to its visual score.

    With n candidates, C entries per KV head on average and w of them for the observation window, ``base = C - w``.
    Every KV head gets the floor ``r = rho_min * base``. All ``L * Hkv`` heads divide the rest in proportion to their
    scores s:

        cap = (base - r) * L * Hkv * s / sum(s)  +  r  +  w

    The score of a KV head is the sum over its g query heads. Scores are measured offline
    (``python -m mmkv_bench calibrate sparsemm``), so caps are known before the prefill. A head holds at most n entries:
    the others divide the excess in proportion to their shares (water-filling), and the model holds exactly
    ``C * L * Hkv`` entries. If all scores are 0, every cap is ``r + w`` (the sum of the floors is rounded down), and
    the rest of the budget stays unused.

    Args:
        calibration: ``{"scores": [[one per query head] per layer], "kv_heads": Hkv}``, finite, 0 or more. In a
            configuration ``auto`` or a path; the allocator can divide a budget only after this artefact is loaded.
        window: w [tokens], ``min(w, max(1, C // 2), n)`` of them, given to every head first; equal to the selector's
            window.
        rho_min: share of ``base``, the budget without its window, that every head gets, in [0, 1].
        scores: "calibrated"; "random", a control of the paper: scores of the same shape, drawn evenly from [0, 1);
            "uniform": the same cap for every head. MM-ShiftKV's release does this, because it overwrites the caps with
            a constant.
        draw: seed of the random scores; no other setting reads it.
        surplus: "redistribute": other heads get what a head cannot hold; "drop": it is lost, so short prompts store
            less than their budget.
        rounding: "remainder": largest remainder, exact totals; "nearest": r is rounded down first, and each cap is
            rounded separately, halves to the even number. The model may then hold a few entries more than its budget,
            so this is allowed under ``reading=released`` alone.

    Paper and code (``reading=released``): the paper's equation 14 adds r to a term that contains r already. The release
    computes the cap above, with ``rounding=nearest`` and ``surplus=drop``. It compresses nothing if ``base > T - w``,
    that is ``C > T``, where every method here keeps everything. Only the release pools scores (average over 5 tokens), as
    all methods of the window family do here.
    """

    calibrated_by = "sparsemm"

    calibration: Mapping[str, Any] | str | None = None
    window: int = 32
    rho_min: float = 0.1
    scores: Literal["calibrated", "random", "uniform"] = "calibrated"
    draw: int = 0
    surplus: Literal["redistribute", "drop"] = "redistribute"
    rounding: Literal["remainder", "nearest"] = "remainder"

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "tokens", "window")
        check_share(self, "rho_min", "the budget")
        if self.rounding == "nearest" and self.surplus == "redistribute":
            raise ConfigError(
                "rounding=nearest with surplus=redistribute: separately rounded caps have no fixed total, so "
                "nothing can be redistributed; allowed: rounding=remainder, or surplus=drop"
            )
        if isinstance(self.calibration, Mapping):
            _check_calibration(self.calibration)

    @property
    def exceeds(self) -> bool:
        return self.rounding == "nearest"

    @property
    def falls_short(self) -> bool:
        blank = (
            isinstance(self.calibration, Mapping)
            and self.scores == "calibrated"
            and not any(any(row) for row in self.calibration["scores"])
        )
        return self.rounding == "nearest" or self.surplus == "drop" or blank

    def method_version(self, method: Composed) -> int:
        """Return 2 if a head's minimum is rounded down to whole entries, as in the released code; else 1."""
        return 2 if self.rounding == "nearest" and self.scores != "uniform" else 1

    @staticmethod
    def needs_calibration(parameters: Mapping[str, Any]) -> bool:
        """Tell whether these parameters need head scores. Random scores take their shape from them."""
        return parameters.get("scores", "calibrated") != "uniform"

    @property
    def follows_prompt(self) -> bool:
        return False  # scores are measured beforehand, or drawn

    def caps(
        self,
        scores: Sequence[Tensor],
        budget: int,
        layers: Sequence[int],
        n_layers: int,
        context: Context | None = None,
    ) -> list[Tensor]:
        heads, candidates = scores[0].shape
        if self.scores == "uniform":
            return same_in_heads(scores, [min(budget, candidates)] * len(scores))
        caps = self.model_caps(budget, candidates, n_layers, heads)
        return [torch.tensor(caps[layer], dtype=torch.int64) for layer in layers]

    def allowance(self, budget: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        """Return the sum of these layers' caps divided by the number of KV heads, rounded up."""
        if self.scores == "uniform":
            return super().allowance(budget, candidates, layers, n_layers)
        caps = self.model_caps(budget, candidates, n_layers)
        return math.ceil(Fraction(sum(sum(caps[layer]) for layer in layers), len(caps[0])))

    def model_caps(self, budget: int, candidates: int, n_layers: int, kv_heads: int | None = None) -> list[list[int]]:
        """Return the entries per layer and KV head of the whole model, window included.

        Args:
            budget: C.
            candidates: n.
            n_layers, kv_heads: numbers of the model's layers and KV heads. kv_heads=None: not compared with the
                calibration.

        Raises:
            CalibrationError: no calibration, or a calibration of another shape.
        """
        visual = self._kv_head_scores()
        if len(visual) != n_layers or kv_heads not in (None, len(visual[0])):
            raise CalibrationError(
                f"SparseMM's calibration has {len(visual)} layers of {len(visual[0])} KV heads, but this model "
                f"has {n_layers} of {len(visual[0]) if kv_heads is None else kv_heads}; calibrate this model with "
                "python -m mmkv_bench calibrate sparsemm"
            )
        if budget >= candidates:
            return [[candidates] * len(row) for row in visual]
        window = min(effective_window(self.window, budget, candidates), budget) if self.window else 0
        flat = _divide_entries(
            tuple(score for row in visual for score in row),
            budget - window,
            candidates - window,
            self.rho_min,
            self.surplus,
            self.rounding,
        )
        width = len(visual[0])
        return [[cap + window for cap in flat[i : i + width]] for i in range(0, len(flat), width)]

    def _kv_head_scores(self) -> list[list[float]]:
        if not isinstance(self.calibration, Mapping):
            raise CalibrationError(
                f"SparseMM has no head scores (calibration={self.calibration!r}); give it a model's artefact, made with "
                "python -m mmkv_bench calibrate sparsemm"
            )
        table, heads = self.calibration["scores"], self.calibration["kv_heads"]
        if self.scores == "random":
            stream = random.Random(self.draw)
            table = [[stream.random() for _ in row] for row in table]
        group = len(table[0]) // heads
        return [[sum(row[head * group : (head + 1) * group]) for head in range(heads)] for row in table]


@lru_cache(maxsize=256)
def _divide_entries(
    visual: tuple[float, ...], base: int, room: int, rho_min: float, surplus: str, rounding: str
) -> tuple[int, ...]:
    """Return the entries of every head of the model without the window's, at most ``room`` each.

    visual: scores of the heads. base: mean entries per head. The other arguments are parameters of ``HeadScores``.
    """
    exact = [Fraction(score) for score in visual]
    floor, total = exact_decimal(rho_min) * base, sum(exact)
    if rounding == "nearest":
        floor = Fraction(math.floor(floor))
    entries_per_score = (base - floor) * len(exact) / total if total else Fraction(0)
    shares = [entries_per_score * score + floor for score in exact]
    if rounding == "nearest":
        return tuple(min(round(share), room) for share in shares)
    entries = math.floor(sum(shares))  # the whole budget, or less if no head has a score
    if surplus == "redistribute":
        return tuple(water_fill(shares, entries, room))
    return tuple(min(count, room) for count in water_fill(shares, entries, entries))


def _check_calibration(calibration: Mapping[str, Any]) -> None:
    """Raise CalibrationError unless the calibration is a table of finite scores whose rows divide into KV heads."""
    table, heads = calibration.get("scores"), calibration.get("kv_heads")
    if (
        not isinstance(table, Sequence)
        or not table
        or not all(isinstance(row, Sequence) and row for row in table)
        or not isinstance(heads, int)
        or heads <= 0
        or {len(row) for row in table} != {len(table[0])}
        or len(table[0]) % heads
    ):
        raise CalibrationError(
            "SparseMM's calibration is not a table of head scores; allowed: scores, one row of query heads per "
            "layer, and kv_heads, which divides the rows; make the calibration with python -m mmkv_bench "
            "calibrate sparsemm"
        )
    if not all(isinstance(s, int | float) and math.isfinite(s) and s >= 0 for row in table for s in row):
        raise CalibrationError(
            "SparseMM's calibration has a score that is not a number of 0 or more; make the calibration again "
            "with python -m mmkv_bench calibrate sparsemm"
        )

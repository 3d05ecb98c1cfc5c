"""LOOK-M's scores: heavy hitters, text before images and videos."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class TextPriorScorer(Scorer):
    """LOOK-M (arXiv 2406.18139) and MEDA (arXiv 2502.17599, eq. 8 and 9): accumulated attention with a text prior.

    ``s_j = sum_i A[i, j]`` over all T causal queries, summed over the g query heads of a KV head; for text tokens
    ``s_j += max_j s_j``, the head's maximum over all T tokens. Every text token then ranks before every visual one (a
    sum that rounds to the maximum itself is raised to the next float32). Sums are float32, so text tokens are ordered
    among themselves only up to the spacing of numbers twice the maximum, which matters only when not all text fits.
    Recents and the rule for text above the budget belong to the selector (``TextRecents``). Fallback
    ``no_visual_tokens``: a prompt without visual tokens, or of unknown types, is scored by H2O's plain sums.

    Args:
        prior: text scores get the head's largest score on top, so that text ranks before visual tokens; false leaves
            the sums as they are (H2O's scores, and LOOK-M's ablation "without text prior").

    Paper and code: the releases of LOOK-M and MEDA subtract 65516 from image tokens and recents, which keeps all text
    whatever the budget (``TextRecents(rule="all_text")``) and orders everything else as here. Not reproduced: bfloat16
    sums, 576 tokens per image and batch of one.
    """

    streams = False
    needs = Needs(column_sums=True)
    prior: bool = True

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.prior,)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        sums, types = obs.column_sums, obs.token_types
        if not self.prior or types is None or not bool((types > 0).any()):
            return sums
        return add_text_prior(sums, types)

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        has_no_visual = types is None or not bool((types > 0).any())
        return ("no_visual_tokens",) if self.prior and has_no_visual else ()


def add_text_prior(sums: Tensor, types: Tensor) -> Tensor:
    """Return the sums with each row's maximum added to its text tokens, ``[Hkv, n]``.

    sums: float32 ``[Hkv, n]``, 0 or more. types: int ``[n]``.
    """
    largest = sums.amax(-1, keepdim=True)
    score_above_all = torch.nextafter(largest, torch.full_like(largest, torch.inf))
    return torch.where(types.to(sums.device) == 0, torch.maximum(sums + largest, score_above_all), sums)


def remove_text_prior(scores: Tensor, types: Tensor) -> Tensor:
    """Return the sums from which ``add_text_prior`` made these scores, up to its rounding.

    The maximum of the sums is the larger of the largest visual score and half of the largest text score.
    """
    text = types.to(scores.device) == 0
    visual = scores.masked_fill(text, 0).amax(-1, keepdim=True)
    largest = torch.maximum(visual, scores.masked_fill(~text, 0).amax(-1, keepdim=True) / 2)
    return torch.where(text, (scores - largest).clamp_min(0), scores)

"""KeyDiff: keys that point away from the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import is_half
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class KeyDiffScorer(Scorer):
    """KeyDiff (arXiv 2504.15364, section 3): distinctive keys attract attention.

    Per KV head the anchor is the mean of the normalised (post-RoPE) keys, and the score of a key is minus its cosine
    similarity to the anchor. No attention is needed.

    Args:
        window: last tokens left out of the anchor [tokens]. 0 in the paper reading.
        score_rounding: "none": float32 throughout; "model": unit keys, anchor and similarities are rounded to the
            model's dtype, which makes many ties in half precision. Nothing changes in float32, and rows of float32
            models do not include this parameter.

    Paper and code: the paper evicts block by block as the prompt arrives; here, as in kvpress and MM-ShiftKV, it is
    one-shot. MM-ShiftKV's paper forces only the last token and keeps C entries; its released class leaves a window of
    32 out of the anchor, and keeps this window AND C entries of the rest: ``min(C + 32, T)``.
    ``reading=released`` reproduces this by ``window=32`` here and in the selector, ``excess=32`` in the allocator,
    where the audit counts it, and ``score_rounding=model``.
    """

    window: int = 0
    score_rounding: Literal["none", "model"] = "none"

    negative = True
    later = ("score_rounding",)
    halves = ("score_rounding",)

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 0, "tokens", "window")

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.window, self.score_rounding)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        rounds_to_model = self.score_rounding == "model" and is_half(obs.key.dtype)
        unit = torch.nn.functional.normalize(obs.key if rounds_to_model else obs.key.float(), dim=-1)
        prefix = unit[:, : max(0, obs.length - self.window)]
        if prefix.shape[1] == 0:  # the window is the whole prompt: all of it stays
            return torch.zeros(obs.key.shape[:2], dtype=torch.float32, device=obs.device)
        if rounds_to_model:
            return -torch.nn.functional.cosine_similarity(obs.key, prefix.mean(1, keepdim=True), dim=-1)
        anchor = torch.nn.functional.normalize(prefix.mean(1), dim=-1)
        return -torch.bmm(unit, anchor.unsqueeze(-1)).squeeze(-1)

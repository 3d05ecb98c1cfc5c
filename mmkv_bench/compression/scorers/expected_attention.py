"""Expected Attention: attention of queries drawn from the prompt's distribution, at later positions."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import softmax
from mmkv_bench.compression.numerics.moments import average_rotation, expected_logits
from mmkv_bench.compression.observation import QUERY_MOMENTS_SKIP, Needs, Observation
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.compression.scorers.base import Scorer

MINIMUM_QUERIES = 2  # for the moments; one query has no covariance


@dataclass(frozen=True)
class ExpectedAttentionScorer(Scorer):
    """Expected Attention (arXiv 2510.00636): closed-form attention of a Gaussian over future queries.

    Per query head, mu and S are mean and population covariance of the pre-RoPE queries of tokens 4..T-1 (with the
    projection's bias and the query norm). R is the average of the rotations at the next ``future`` positions:
    ``z_j = scaling * (R mu).k_j + scaling^2 / 2 * k_j^T (R S R^T) k_j``. The score is the softmax of z over the
    non-sink tokens, averaged over the g query heads of a KV head, plus ``epsilon``, times ``||v_j||``. Under mrope all
    axes advance together, as text does after the prompt.

    Args:
        future: positions averaged over [tokens].
        sinks: first tokens left out of the softmax [tokens]; they get their head's largest score, and the selector
            protects ``min(sinks, C - 1)`` of them. The moments always leave out the first 4.
        epsilon: added to the probability before it is multiplied by the value norm.
        covariance: use the second-order term.
        value_norm: multiply by the value norm.
        rounding: "none": float32 throughout; "model": moments, logits, probabilities, head means and norms are rounded
            to the model's dtype, which makes many ties in bfloat16.

    Fallback ``statistics_undefined``: fewer than two queries remain for the moments (T < 6 by default); the most recent
    tokens are kept instead.

    Paper and code: kvpress, the authors' release, drops the query bias in older versions, refuses models with a query
    norm, and takes 1-D future positions, which are not those of a model with mrope. ``reading=released`` is
    MM-ShiftKV's copy as far as it can run: the last token is forced (``recents=1``) and everything is rounded
    (``rounding=model``). Not reproduced: its 1-D future positions, its rotation averaged in half precision, a budget
    given as a ratio (compared as text, never used), and a dispatcher that never selects the class, so that the row
    in MM-ShiftKV's table cannot come from it.
    """

    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    covariance: bool = True
    value_norm: bool = True
    rounding: Literal["none", "model"] = "none"

    needs = Needs(query_moments=True)

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 1, "positions", "future")
        check_least(self, 0, "tokens", "sinks")
        check_least(self, 0, "", "epsilon")

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return astuple(self)

    def _undefined(self, length: int) -> bool:
        return length - max(QUERY_MOMENTS_SKIP, self.sinks) < MINIMUM_QUERIES

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        return ("statistics_undefined",) if self._undefined(length) else ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        if self._undefined(obs.length):
            position = torch.arange(obs.length, dtype=torch.float32, device=obs.device)
            return position.expand(obs.key.shape[0], -1)

        def stored(x: Tensor) -> Tensor:
            return x if self.rounding == "none" else x.to(obs.key.dtype).float()

        cos, sin = obs.rope(torch.arange(1, self.future + 1))
        mean, covariance = average_rotation(obs.query_mean, obs.query_covariance, cos, sin)
        key, value = obs.key[:, self.sinks :], obs.value[:, self.sinks :]
        second_moment = stored(covariance) if self.covariance else None
        logits = expected_logits(key, stored(mean), second_moment, obs.scaling)
        learned_sinks = None if obs.sinks is None else obs.sinks.view(-1, obs.groups)
        score = stored(stored(softmax(stored(logits), learned_sinks)).mean(1)) + self.epsilon
        if self.value_norm:
            score = stored(score * stored(value.float().norm(dim=-1)))
        sink_scores = score.amax(-1, keepdim=True).expand(-1, self.sinks)
        return torch.cat([sink_scores, score], 1)

"""InfiniPot-V: entries that recent frames do not repeat, and large values."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Frames, Observation, text_fallbacks
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class InfiniPotVScorer(Scorer):
    """InfiniPot-V (arXiv 2506.15745, sections 3.1 to 3.3): temporal redundancy (TaR) and value norm (VaN).

    Of C entries per KV head a share alpha goes to the r most recent frames and to the older entries that these frames
    repeat least; the rest goes to the largest values. With unit keys k and the same place (i, j) of the frame::

        TaR(t, i, j) = -1/r sum_{t' recent} cos(k(t, i, j), k(t', i, j))        VaN(t, i, j) = |v(t, i, j)|_2

    Text ranks before everything else. An older entry gets TaR 0 if no recent frame has an entry left in the same place.
    Fallback ``no_frames``: outside of ``protocol=stream`` frames are unknown, and entries are ranked by their value
    norm.

    Args:
        alpha: share of the budget for recent frames and TaR, in [0, 1]; 0 is the value norm alone.
        recent: r as a share of the frames that the stored entries would fill, in (0, 1], at least one frame.

    Paper and code (equations from the release aiha-lab/InfiniPot-V and from notes on the paper): the paper compresses
    to C when the cache reaches a larger M; here M is C plus a chunk of the video. Not reproduced: the release lays out
    the remaining entries as if they were whole frames, so that after the first compression different places are
    compared. It pools value norms over neighbouring places. It does not count text towards C, and fails if recent
    frames alone exceed alpha C; here they then take entries from VaN's share.
    """

    alpha: float = 0.5
    recent: float = 0.25

    comparable = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or not 0 < self.recent <= 1:
            raise ConfigError(
                f"alpha={self.alpha} and recent={self.recent} are not both shares; allowed: alpha in [0, 1], "
                "recent in (0, 1]"
            )

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return (self.alpha, self.recent, budget)

    def observed_fallbacks(self, obs: Observation, budget: int, seed: int) -> tuple[str, ...]:
        return ("no_frames",) if obs.frames is None else text_fallbacks(obs, obs.frames, budget)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        norm = obs.value.double().norm(dim=-1)
        norm = norm / norm.amax(-1, keepdim=True).clamp_min(1e-30)
        if obs.frames is None:
            return norm
        number, cell = obs.frames.number[obs.tokens], obs.frames.cell[obs.tokens]
        text = number < 0
        if self.alpha == 0:
            return norm + 3.0 * text
        frames = ((~text).sum(-1, keepdim=True) * self.recent / obs.frames.size).long().clamp_min(1)
        recent = ~text & (number > number.max() - frames)
        distinct = self._distinct(obs, obs.frames, cell, recent).masked_fill(text | recent, -torch.inf)
        granted = budget - round((1 - self.alpha) * budget) - recent.sum(-1, keepdim=True)
        rank = distinct.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        least_redundant = (rank < granted) & ~(text | recent)
        return norm + 3.0 * text + 2.0 * recent + 1.0 * least_redundant

    @staticmethod
    def _distinct(obs: Observation, frames: Frames, cell: Tensor, recent: Tensor) -> Tensor:
        """Return TaR (temporal redundancy) of every stored entry, float32 ``[Hkv, S]``.

        cell: each entry's place in its frame. recent: bool, the entries of the most recent frames.
        """
        unit = torch.nn.functional.normalize(obs.key.float(), dim=-1)
        heads, _, dim = unit.shape
        cell_index = cell[..., None].expand(-1, -1, dim)
        held = recent.to(unit.dtype)
        sums = unit.new_zeros(heads, frames.size, dim).scatter_add_(1, cell_index, unit * held[..., None])
        count = unit.new_zeros(heads, frames.size).scatter_add_(1, cell, held)
        return -(unit * sums.gather(1, cell_index)).sum(-1) / count.gather(1, cell).clamp_min(1)

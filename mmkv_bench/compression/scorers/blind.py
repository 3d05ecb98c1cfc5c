"""Control without the image: text entries, the latest first."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import UnsupportedError


@dataclass(frozen=True)
class BlindScorer(Scorer):
    """A control that keeps no visual entry, a floor for every method's score. No parameters.

    Text token j (markers around an image included) scores j + 1, a visual token -1. ``PositiveOnly`` grants visual
    tokens nothing, so the latest text entries stay, up to C. Text entries after an image have already absorbed some of
    it during the full prefill; the control does not undo that. A prompt within its budget is kept whole, image
    included, as with every method; there the control has no meaning.

    Raises:
        UnsupportedError: from ``score``, for a prompt without visual tokens or with unknown token types.
    """

    streams = False
    needs_visual = True
    negative = True
    comparable = False

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        types = obs.token_types
        if types is None or not bool((types > 0).any()):
            raise UnsupportedError(
                "blind drops the visual entries, but this prompt has none; allowed: prompts with images or "
                "videos; choose another method for text"
            )
        reading_order = torch.arange(1, obs.length + 1, dtype=torch.float32, device=obs.device)
        modality_score = torch.where(types.to(obs.device) > 0, -1.0, reading_order)
        return modality_score.expand(obs.key.shape[0], -1)

"""A control that shows smaller pictures; it scores nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import UnsupportedError


@dataclass(frozen=True)
class PixelsScorer(Scorer):
    """A control that shows smaller images, or videos with fewer frames, until the full cache fits. No parameters.

    It shows what equal memory gives without any method. Nothing is evicted: ``generation/smaller_prompts.py`` makes the
    smaller prompt through the model's own processor, and it is prefilled by itself. Fallback ``pixels_over_budget``:
    the smallest pictures leave more entries than the budget, and are used. A prompt within its budget equals `full`.

    Raises:
        UnsupportedError: from ``score``, which is only called outside of a run.
    """

    needs_visual = True
    comparable = False
    resamples = True
    over_budget: ClassVar[str] = "pixels_over_budget"
    alone: ClassVar[str] = (
        "pixels shows the model smaller pictures, which only a run can make of each sample's own pictures; it "
        "compresses no cache; use it in a run (method=pixels) on images or videos"
    )

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        raise UnsupportedError(self.alone)

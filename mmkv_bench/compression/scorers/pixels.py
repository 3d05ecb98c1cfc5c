"""Control that shows smaller pictures; it scores nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.errors import UnsupportedError


@dataclass(frozen=True)
class PixelsScorer(Scorer):
    """Full cache of the prompt with its images at a smaller size, or videos with fewer frames, so that its entries are the most
    that do not exceed the budget: what the same memory buys without any method. No parameters.

    Nothing is scored and nothing is evicted: ``generation/smaller_prompts.py`` makes the smaller prompt through the model's own
    processor, and it is prefilled by itself. Where the smallest pictures leave more entries than the budget, these are taken
    and the row says so (``pixels_over_budget``). A prompt within its budget is `full`'s.

    Raises:
        UnsupportedError: from ``score``, which is asked where no run makes a smaller prompt.
    """

    needs_visual = True
    comparable = False
    resamples = True
    over_budget: ClassVar[str] = "pixels_over_budget"
    alone: ClassVar[str] = (
        "pixels shows the model smaller pictures, which a run makes of each sample's own; it compresses no cache, and a prompt "
        "without pictures has nothing to be made smaller; use it in a run (method=pixels) on images or videos"
    )

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        raise UnsupportedError(self.alone)

"""A control that gives the model a shorter text; it scores nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmkv_bench.compression.scorers.pixels import PixelsScorer


@dataclass(frozen=True)
class CutPromptScorer(PixelsScorer):
    """A control that cuts the middle out of a prompt's text until its full cache fits the budget. No parameters.

    It shows what equal memory gives without any method, for prompts without pictures. Half of the tokens that fit are
    the prompt's first tokens, half its last ones, as LongBench cuts prompts (Bai et al. 2023, section 4.1).
    ``generation/smaller_prompts.py`` makes the shorter prompt, which is prefilled by itself. Fallback
    ``cut_prompt_over_budget``: the template alone leaves more entries than the budget. A prompt within its budget
    equals `full`. A prompt with pictures, or of several turns, is an error of its sample.
    """

    needs_visual = False
    over_budget: ClassVar[str] = "cut_prompt_over_budget"
    alone: ClassVar[str] = (
        "cut_prompt gives the model a shorter text, which only a run can make of each sample's own text; it "
        "compresses no cache; use it in a run (method=cut_prompt)"
    )

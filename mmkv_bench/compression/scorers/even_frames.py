"""A control that keeps frames evenly spaced over everything seen so far."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Observation, text_fallbacks
from mmkv_bench.compression.scorers.base import Scorer

_TEXT = 64.0  # above every power of two that divides a frame's number


@dataclass(frozen=True)
class EvenFramesScorer(Scorer):
    """A control that keeps evenly spaced frames: all, every second, every fourth, ... No parameters.

    A frame scores the power of two that divides its number, the first frame most. Of frames with equal scores every
    second is evicted first, by the same rule. So the kept frames of a video stream are evenly spaced at any time,
    although its length is unknown. Text before the first frame and between frames scores higher than frames. A pair of
    frames that the model encodes together counts as one frame. Under other protocols than ``protocol=stream``, and for
    a text, tokens take the place of frames.

    Paper and code: none is reproduced. Sampling fewer frames before the model sees them is ``model.frames``.
    """

    comparable = False

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def observed_fallbacks(self, obs: Observation, budget: int, seed: int) -> tuple[str, ...]:
        return () if obs.frames is None else text_fallbacks(obs, obs.frames, budget)

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        tokens = obs.tokens
        frame_number = tokens if obs.frames is None else obs.frames.number[tokens]
        first_power = _power(frame_number)
        second_power = _power((frame_number >> first_power.clamp_max(62)) >> 1)  # orders odd multiples of one power
        frame_score = first_power.double() + second_power.double() / 64
        return torch.where(frame_number < 0, _TEXT, frame_score)


def _power(number: Tensor) -> Tensor:
    """Return the largest k such that 2**k divides the number, int64; 63 for 0 and for negative numbers."""
    lowest = number & -number
    return torch.where(number > 0, lowest.clamp_min(1).double().log2().long(), 63)

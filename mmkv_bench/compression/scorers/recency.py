"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.scorers.base import Scorer


@dataclass(frozen=True)
class RecencyScorer(Scorer):
    """StreamingLLM (arXiv 2309.17453, section 3.2): the later a token, the higher its score. No parameters.

    The selector ``TopK(sinks=4)`` keeps ``min(4, C - 1)`` first tokens (attention sinks), and recency fills the rest
    with the last ``C - 4`` tokens.

    Paper and code: the original evicts one entry per new token and rotates keys by their index in the cache. The
    field's benchmarks use it one-shot at the end of the prefill with true positions, as here. MM-ShiftKV's release has
    4 sinks in a clean process, so ``reading=released`` changes nothing; 1 or 32 if another method's set-up ran before
    (``sinks=1`` or ``sinks=32``).
    """

    comparable = False

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        position = torch.arange(obs.length, dtype=torch.float32, device=obs.device)
        return position.expand(obs.key.shape[0], -1)

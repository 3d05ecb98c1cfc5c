"""A control that keeps a random sample of everything seen so far, whatever its age."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Observation
from mmkv_bench.compression.scorers.base import Scorer

_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio's bits, as int64
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # of splitmix64


@dataclass(frozen=True)
class ReservoirScorer(Scorer):
    """Reservoir sampling with random priorities: every token of every KV head draws one number, once. No parameters.

    Under ``protocol=stream`` the entries with the C largest numbers so far stay: a uniform sample of all tokens,
    however often entries were evicted. ``random`` draws again at every eviction, so old entries die out geometrically.
    With a single eviction both are uniform.

    The number is a hash (splitmix64) of the token's index and of a start value, which is drawn on the CPU from (seed,
    sample, layer, head).

    The idea is Vitter's algorithm R (ACM TOMS 11, 1985) in its form with priorities.
    """

    stochastic = True
    comparable = False

    def key(self, budget: int, length: int) -> tuple[object, ...]:
        return ()

    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        stream = obs.generator("reservoir", seed, every_round=False)
        start = torch.randint(2**62, (obs.key.shape[0], 1), generator=stream).to(obs.device)
        mixed = start + (obs.tokens + 1) * _ODD
        mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
        mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
        return _shift_right(mixed ^ _shift_right(mixed, 31), 11).double() / 2**53


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Shift right by ``bits``, filling with zeros; torch's shift of int64 would copy the sign."""
    return (numbers >> bits) & (2 ** (64 - bits) - 1)

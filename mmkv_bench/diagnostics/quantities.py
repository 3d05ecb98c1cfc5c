"""What the papers' analyses look at in one layer of one prompt: numbers of an observation, each by its definition.

Each function gives `Value`s of one layer. `length` is the prompt's; what stands behind it in the observation are tokens of
the full cache's own answer (`measuring.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from mmkv_bench.compression.numerics.dct import dct
from mmkv_bench.compression.numerics.entropy import cross_modal_entropy
from mmkv_bench.compression.numerics.text_attention import top_mass
from mmkv_bench.compression.observation import Needs

if TYPE_CHECKING:
    from mmkv_bench.compression.observation import Observation

POINTS = 100  # of a Lorenz curve
SHARES = tuple(i / 20 for i in range(1, 21))  # of the keys, whose attention is added up
BANDS = 128  # of a spectrum
OUTLIERS = 0.001  # of a layer's query channels
PROXIES = 512


class Value(NamedTuple):
    """One number of a layer. part: what it is of; x: place on the curve that it is a point of."""

    quantity: str
    value: float
    part: str = ""
    head: int | None = None
    x: float | None = None


@dataclass(frozen=True)
class Quantity:
    """One analysis.

    Attributes:
        needs: what must be gathered in the prefill; answer: of the prompt with the full cache's own answer behind it.
        read: of one layer and the prompt's length. figures: where the papers show it; about: what it is, in a sentence.
    """

    needs: Needs
    read: Callable[[Observation, int], Iterator[Value]]
    figures: str
    about: str
    answer: bool = False


def hidden_states(obs: Observation, length: int) -> Iterator[Value]:
    """Mean and population standard deviation over all values of the query projection's inputs: of the prompt, of its text
    and its visual tokens apart, and of the tokens that are fed while the answer is decoded."""
    states = obs.states
    types = torch.zeros(length) if obs.token_types is None else obs.token_types[:length].to(states.device)
    parts = {"prompt": states[:length], "text": states[:length][types == 0], "visual": states[:length][types > 0]}
    parts["answer"] = states[length:]
    for part, rows in parts.items():
        if rows.numel():
            values = rows.double()
            yield Value("mean", float(values.mean()), part)
            yield Value("std", float(values.std(correction=0)), part)


def lorenz(obs: Observation, length: int) -> Iterator[Value]:
    """How unevenly tokens gather attention (column sums over all queries and query heads): share of it that the lowest x of
    the tokens have, linear between tokens, and the Gini coefficient, ``2 sum_i i s_i / (n sum s) - (n + 1) / n`` of the
    ascending sums s."""
    sums = obs.column_sums.double().sum(0).cpu().sort().values
    n, total = len(sums), float(sums.sum())
    curve = torch.cat([torch.zeros(1, dtype=torch.float64), sums.cumsum(0)]) / total
    for point in range(1, POINTS + 1):
        place = point * n / POINTS
        low = min(math.floor(place), n - 1)
        yield Value("lorenz", float(curve[low] + (place - low) * (curve[low + 1] - curve[low])), x=point / POINTS)
    rank = torch.arange(1, n + 1, dtype=torch.float64)
    yield Value("gini", float(2 * (rank * sums).sum() / (n * total) - (n + 1) / n))


def entropy(obs: Observation, length: int) -> Iterator[Value]:
    """MEDA's cross-modal entropy (eq. 4 to 6), in nats; nothing where the prompt has one modality."""
    types = obs.token_types
    if types is not None and bool((types > 0).any()) and bool((types == 0).any()):
        yield Value("cross_modal_entropy", cross_modal_entropy(obs.queries, obs.key, obs.scaling, types))


def cumulative_attention(obs: Observation, length: int) -> Iterator[Value]:
    """Attention that text queries pay to their largest x of the prompt's keys, per KV head: HybridKV's S* at 20 shares."""
    types = obs.token_types
    rows = [] if types is None else (types == 0).nonzero().flatten().tolist()
    for share in SHARES:
        mass = top_mass(obs.queries, obs.key, obs.scaling, rows or range(length), math.ceil(share * length - 1e-9))
        for head, value in enumerate(mass.tolist()):
            yield Value("top_mass", value, head=head, x=share)


def power_spectrum(obs: Observation, length: int) -> Iterator[Value]:
    """Shares of the energy of an orthonormal DCT along the tokens in 128 equal bands of frequency, all heads and channels of
    keys (as stored, rotated) and of values; x is a band's middle, 1 the highest frequency."""
    band = torch.arange(length, device=obs.device) * BANDS // length
    for part, tensor in (("keys", obs.key), ("values", obs.value)):
        power = torch.zeros(length, dtype=torch.float64, device=obs.device)
        for head in tensor:
            power += dct(head.float().T).double().square().sum(0)
        shares = torch.zeros(BANDS, dtype=torch.float64, device=obs.device).index_add_(0, band, power) / power.sum()
        for number, share in enumerate(shares.tolist()):
            yield Value("power", share, part, x=(number + 0.5) / BANDS)


def outlier_hits(obs: Observation, length: int) -> Iterator[Value]:
    """MM-ShiftKV's Table 14, whose definition is not printed; ours: of a layer's query channels before rotation (Hq * D) the
    0.1 % that reach furthest from 0 while the answer is decoded; the share of them in which some of 512 proxies, drawn as the
    method draws them with gamma 1 and 10, reaches as far."""
    prompt, answer = obs.states[:length].float(), obs.states[length:]
    reached = obs.project(answer).float().abs().amax(1).flatten()
    top = reached.topk(max(1, math.ceil(OUTLIERS * len(reached) - 1e-9))).indices
    mean, std = prompt.mean(0), prompt.std(0, correction=0)
    noise = torch.randn((PROXIES, prompt.shape[1]), generator=obs.generator("mmshift", 0), dtype=torch.float32)
    for gamma in (1.0, 10.0):
        proxies = obs.project(mean + gamma * std * noise.to(obs.device)).float().abs().amax(1).flatten()
        yield Value("outlier_hit_rate", float((proxies[top] >= reached[top]).double().mean()), x=gamma)


QUANTITIES = {
    "hidden_states": Quantity(
        Needs(states=True), hidden_states, "MM-ShiftKV figures 1a and 6", "mean and spread, prompt against answer", True
    ),
    "outlier_hits": Quantity(
        Needs(states=True), outlier_hits, "MM-ShiftKV table 14", "outlier channels that proxies reach", True
    ),
    "lorenz": Quantity(Needs(column_sums=True), lorenz, "PrefixKV figures 2 and 4", "Lorenz curves and Gini"),
    "entropy": Quantity(Needs(queries=True), entropy, "MEDA figure 2", "cross-modal entropy"),
    "cumulative_attention": Quantity(
        Needs(queries=True), cumulative_attention, "HybridKV figure 3", "attention of the largest keys"
    ),
    "power_spectrum": Quantity(Needs(), power_spectrum, "FlashCache figures 1, 4 and 7 to 9", "energy by frequency"),
}
"""Name on the command line -> the analysis."""

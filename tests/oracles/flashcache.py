"""FlashCache from equations 6 to 12 of the paper: float64, the cosine sums written out, no FFT, no shared code.

K and V of a layer are lists over heads of ``[T, D]``.
"""

from __future__ import annotations

import functools
import math
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor


def cutoff(gamma: str, length: int) -> int:
    """omega = gamma * N, a whole number of bins, one at least."""
    return max(1, int(Decimal(gamma) * length))


@functools.cache
def basis(length: int) -> Tensor:
    """``[m, n]``: alpha[m] * cos(pi / N * m * (n + 1/2)), equations 6 and 7."""
    m, n = torch.arange(length, dtype=torch.float64)[:, None], torch.arange(length, dtype=torch.float64)
    alpha = torch.full((length, 1), math.sqrt(2 / length), dtype=torch.float64)
    alpha[0] = math.sqrt(1 / length)
    return alpha * torch.cos(math.pi / length * m * (n + 0.5))


def transform(x: Tensor) -> Tensor:
    """Equation 6: ``[T, D]`` -> bins ``[T, D]``."""
    return basis(len(x)) @ x.double()


def base(x: Tensor, omega: int) -> Tensor:
    """Equations 8 and 9: bins below omega alone, back in time."""
    bins = transform(x)
    bins[omega:] = 0
    return basis(len(x)).T @ bins


def deviation(keys: list[Tensor], values: list[Tensor], omega: int, joint: bool) -> Tensor:
    """Equation 10 ``[heads, T]``; joint: the mean square runs over the channels of all heads."""
    groups = [range(len(keys))] if joint else [[h] for h in range(len(keys))]
    out = torch.zeros(len(keys), len(keys[0]), dtype=torch.float64)
    for group in groups:
        for tensors in (keys, values):
            for n in range(len(keys[0])):
                squares = []
                for h in group:
                    left = tensors[h][n].double() - base(tensors[h], omega)[n]
                    squares += [c * c for c in left.tolist()]
                for h in group:
                    out[h, n] += math.fsum(squares) / len(squares)
    return out


def fast_deviation(keys: list[Tensor], values: list[Tensor], omega: int, joint: bool) -> Tensor:
    """The same numbers, one base per tensor; for long prompts."""
    out = torch.zeros(len(keys), len(keys[0]), dtype=torch.float64)
    for tensors in (keys, values):
        out += torch.stack([(x.double() - base(x, omega)).square().mean(-1) for x in tensors])
    return out.mean(0, keepdim=True).expand_as(out) if joint else out


def outlier_share(tensors: list[Tensor], omega: int) -> float:
    """Equation 12 for K or V of one layer: power above bin omega over the power of all bins; 0 of nothing is 0."""
    power = sum(transform(x).square().sum(-1) for x in tensors)
    whole = float(power.sum())
    return float(power[omega + 1 :].sum()) / whole if whole else 0.0


def layer_budgets(ratios: list[float], budget: int, candidates: int) -> list[int]:
    """S_l = R_l / sum R * L * C entries per KV head, at most n: poured out step by step, then rounded."""
    total = budget * len(ratios)
    if not any(ratios):
        ratios = [1.0] * len(ratios)
    weights = [Fraction(r) for r in ratios]
    shares = [Fraction(0)] * len(weights)
    open_, left = list(range(len(weights))), Fraction(total)
    while open_ and left:
        mass = sum(weights[i] for i in open_)
        if mass == 0:  # only layers without outliers have room
            weights = [Fraction(1)] * len(weights)
            continue
        level = min([left / mass] + [(candidates - shares[i]) / weights[i] for i in open_ if weights[i]])
        for i in open_:
            shares[i] += level * weights[i]
        left -= level * mass
        open_ = [i for i in open_ if shares[i] < candidates]
    whole = [math.floor(s) for s in shares]
    while sum(whole) < total:
        lack = [s - c for s, c in zip(shares, whole, strict=True)]
        whole[lack.index(max(lack))] += 1
    return whole


def keep(scores: Tensor, cap: int, forced: set[int]) -> list[list[int]]:
    """Per head: the forced tokens, then the largest deviations; equal ones by position."""
    rows = []
    for row in scores.tolist():
        first = sorted(forced)[max(0, len(forced) - cap) :]
        others = sorted((j for j in range(len(row)) if j not in forced), key=lambda j: (-row[j], j))
        rows.append(sorted(first + others[: cap - len(first)]))
    return rows


def after_removals(scores: Tensor, cap: int, forced: set[int], first: str) -> list[list[int]]:
    """Figure 2, per head: one token after another leaves, the one with the smallest or the largest deviation of those
    still there (of equal ones the last), until cap of them are left; the forced ones never leave."""
    rows = []
    for row in scores.tolist():
        left = list(range(len(row)))
        while len(left) > cap:
            free = [j for j in left if j not in forced] or left
            end = (min if first == "smallest" else max)(row[j] for j in free)
            left.remove(max(j for j in free if row[j] == end))
        rows.append(left)
    return rows

"""MEDA from its equations 4 to 7: float64, one loop per index, nothing of ``mmkv_bench``."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from tests.oracles.look_m import softmax


def entropy(row: list[float]) -> float:
    return -math.fsum(p * math.log(p) for p in row if p > 0)


def head_mean_map(query: Tensor, key: Tensor, scaling: float, rows: list[int], columns: list[int]) -> list[list[float]]:
    """Attention of the tokens `rows` to the tokens `columns` alone, averaged over query heads."""
    group, heads = query.shape[0] // key.shape[0], query.shape[0]
    mean = [[0.0] * len(columns) for _ in rows]
    for h in range(heads):
        for r, i in enumerate(rows):
            scores = scaling * (key[h // group, columns].double() @ query[h, i].double())
            for c, mass in enumerate(softmax(scores.tolist())):
                mean[r][c] += mass / heads
    return mean


def cross_modal(query: Tensor, key: Tensor, scaling: float, types: list[int]) -> float:
    text = [j for j, kind in enumerate(types) if kind == 0]
    visual = [j for j, kind in enumerate(types) if kind > 0]
    total = 0.0
    for rows, columns in ((text, visual), (visual, text)):
        a = head_mean_map(query, key, scaling, rows, columns)
        total += math.fsum(entropy(row) for row in a) / len(rows)
    return total


def full_rows(query: Tensor, key: Tensor, scaling: float) -> float:
    """The release's figure: mean entropy of every causal row of every head."""
    group = query.shape[0] // key.shape[0]
    found = []
    for h in range(query.shape[0]):
        for i in range(query.shape[1]):
            scores = scaling * (key[h // group, : i + 1].double() @ query[h, i].double())
            found.append(entropy(softmax(scores.tolist())))
    return math.fsum(found) / len(found)


def shares(entropies: list[float], mean: Fraction) -> list[Fraction]:
    """softmax(E) * L * mean, exactly, from float64 exponentials."""
    weights = [Fraction(math.exp(e - max(entropies))) for e in entropies]
    return [w / sum(weights) * len(weights) * mean for w in weights]


def allocation(entropies: list[float], budget: int, n: int) -> list[int]:
    """Clip at n, give what is cut to the layers below n in proportion, until nothing is cut; then whole entries."""
    weights = shares(entropies, Fraction(1))
    given = [w * budget for w in weights]
    while any(g > n for g in given):
        full = [i for i, g in enumerate(given) if g >= n]
        rest = budget * len(weights) - n * len(full)
        others = sum(w for i, w in enumerate(weights) if i not in full)
        given = [Fraction(n) if i in full else w * rest / others for i, w in enumerate(weights)]
    whole = [math.floor(g) for g in given]
    while sum(whole) < budget * len(weights):
        lack = [g - w for g, w in zip(given, whole, strict=True)]
        whole[lack.index(max(lack))] += 1
    return whole


def released_allocation(entropies: list[float], mean: Fraction, n: int) -> list[int]:
    """alpha clamped to [0.01, 1]; nothing is divided again."""
    return [math.floor(min(max(share / n, Fraction(1, 100)), Fraction(1)) * n) for share in shares(entropies, mean)]

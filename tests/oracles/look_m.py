"""LOOK-M from its equations: float64, one loop per index, nothing of ``mmkv_bench``.

Lists stand for tensors: ``scores[h][j]``; ``types[j]`` is 0 for text and above 0 for visual tokens.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / math.fsum(powers) for p in powers]


def accumulated(query: Tensor, key: Tensor, scaling: float) -> list[list[float]]:
    """Per KV head, for key j, the causal attention of all rows i >= j, of every query head of that KV head."""
    heads, total = key.shape[:2]
    group = query.shape[0] // heads
    out = [[0.0] * total for _ in range(heads)]
    for h in range(query.shape[0]):
        for i in range(total):
            seen = key[h // group, : i + 1].double()
            for j, mass in enumerate(softmax((scaling * (seen @ query[h, i].double())).tolist())):
                out[h // group][j] += mass
    return out


def with_prior(sums: list[float], types: list[int]) -> list[float]:
    """Text tokens get the largest of all sums on top."""
    return [s + max(sums) if kind == 0 else s for s, kind in zip(sums, types, strict=True)]


def best(among: list[int], scores: list[float], count: int) -> list[int]:
    return sorted(among, key=lambda j: (-scores[j], j))[: max(0, count)]


def strict_set(scores: list[float], granted: int, recents: int) -> list[int]:
    """The last `recents` candidates and the best of the others, `granted` in all."""
    n = len(scores)
    last = list(range(max(0, n - recents), n))
    return sorted(last + best([j for j in range(n) if j not in last], scores, granted - len(last)))


def released_set(scores: list[float], types: list[int], recents: int, important: int) -> list[int]:
    """Rank old tokens with text before visual ones, keep `important` of them, then all text, and the recents."""
    n = len(scores)
    old = range(max(0, n - recents))
    order = sorted(old, key=lambda j: (types[j] > 0, -scores[j], j))
    chosen = set(order[:important]) | {j for j in old if types[j] == 0} | set(range(len(old), n))
    return sorted(chosen)


def union_set(scores: list[float], types: list[int], granted: int, recents: int) -> list[int]:
    """Equation 8 as printed: the recents, the best of the others up to what is granted, and all text."""
    return sorted(set(strict_set(scores, granted, recents)) | {j for j, kind in enumerate(types) if kind == 0})


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))


def nearest(key: Tensor, lost: list[int], kept: list[int]) -> tuple[list[int], list[float], float]:
    """For each lost token its nearest kept one, the cosine, and by how little the runner-up was beaten anywhere."""
    where, how, margin, rows = [], [], math.inf, key.double()
    for i in lost:
        alike = [cosine(rows[i], rows[c]) for c in kept]
        top = max(alike)
        where.append(kept[alike.index(top)])
        how.append(top)
        others = [a for n, a in enumerate(alike) if n != alike.index(top)]
        margin = min([margin, *(top - a for a in others)])
    return where, how, margin


def merged(entries: Tensor, kept: list[int], pairs: list[tuple[int, int, float]], variant: str) -> Tensor:
    """Kept rows of one head's keys or values [n, D] after merging; pairs (source, destination, cosine)."""
    rows = []
    for c in kept:
        own = entries[c].double()
        total, n = own.clone(), 0
        for source, destination, alike in pairs:
            if destination != c:
                continue
            other = entries[source].double()
            n += 1
            total += {"average": other, "pivot": (other + own) / 2, "weighted": alike * other}[variant]
        rows.append(total / (n + 1))
    return torch.stack(rows)


def reduced(
    key: Tensor, value: Tensor, kept: list[list[int]], types: list[int], variant: str, misaligned: bool = False
) -> tuple[list[Tensor], list[Tensor], float]:
    """Per head the merged keys and values [m, D] (float64), and the smallest margin of any assignment."""
    merging = any(kind > 0 for kind in types)  # a prompt of text alone is H2O's
    lost = [[j for j in range(len(types)) if merging and j not in set(rows)] for rows in kept]
    found = [nearest(k, gone, rows) for k, gone, rows in zip(key, lost, kept, strict=True)]
    margin = min(f[2] for f in found)
    passed = [list(range(len(gone))) for gone in lost]
    if misaligned and lost[0]:
        heads = range(len(kept))
        mean = [math.fsum(found[h][1][r] for h in heads) / len(kept) for r in range(len(lost[0]))]
        overall = math.fsum(mean) / len(mean)
        passed = [[r for r, value in enumerate(mean) if value >= overall]] * len(kept)
        margin = min([margin, *(abs(value - overall) for value in mean)])
    keys, values = [], []
    for h, rows in enumerate(kept):
        where, how, _ = found[h]
        pairs = [
            (lost[h][n if misaligned and variant == "average" else r], where[r], how[r])
            for n, r in enumerate(passed[h])
        ]
        keys.append(merged(key[h], rows, pairs, variant))
        values.append(merged(value[h], rows, pairs, variant))
    return keys, values, margin


def share_of(share: str, entries: int) -> int:
    return math.floor(Fraction(share) * entries)

"""SparseMM by its equations, head by head: budgets in exact fractions, hits from attention rows. No product code."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def kv_scores(table: list[list[float]], kv_heads: int) -> list[list[Fraction]]:
    """Score of a KV head: the sum over the query heads that read it."""
    found = []
    for row in table:
        group = len(row) // kv_heads
        found.append([Fraction(0)] * kv_heads)
        for query_head, score in enumerate(row):
            found[-1][query_head // group] += Fraction(score)
    return found


def real_shares(
    table: list[list[float]], kv_heads: int, base: int, rho_min: Fraction, whole_floor: bool = False
) -> list[Fraction]:
    """b_score + r of every head of the model, layer after layer; base = C - w. The release's r is a whole number."""
    scores = [score for row in kv_scores(table, kv_heads) for score in row]
    r = Fraction(int(rho_min * base)) if whole_floor else rho_min * base
    everything = (base - r) * len(scores)  # what the heads compete for
    total = sum(scores)
    return [(everything * score / total if total > 0 else 0) + r for score in scores]


def rounded(shares: list[Fraction]) -> list[int]:
    """Whole numbers with the same (whole) sum: one entry at a time to whoever lacks most of its share."""
    whole = [math.floor(share) for share in shares]
    while sum(whole) < sum(shares):
        lack = [share - count for share, count in zip(shares, whole, strict=True)]
        whole[lack.index(max(lack))] += 1
    return whole


def poured(shares: list[Fraction], room: int) -> list[Fraction]:
    """What is above `room` goes to the others in proportion to their shares, the fullest head being closed first."""
    held, open_heads, rest = [None] * len(shares), list(range(len(shares))), sum(shares)
    while open_heads:
        level = rest / sum(shares[h] for h in open_heads) if any(shares[h] for h in open_heads) else None
        fullest = max(open_heads, key=lambda h: shares[h])
        if level is None or level * shares[fullest] <= room:
            for h in open_heads:
                held[h] = rest / len(open_heads) if level is None else level * shares[h]
            return held
        held[fullest] = Fraction(room)
        rest -= room
        open_heads.remove(fullest)
    return held


def caps(
    table: list[list[float]],
    kv_heads: int,
    budget: int,
    n: int,
    window: int,
    rho_min: Fraction = Fraction(1, 10),
    surplus: str = "redistribute",
    rounding: str = "remainder",
) -> list[list[int]]:
    """Entries of every layer and KV head with n candidates and C = `budget`, window included."""
    heads = len(table) * kv_heads
    if budget >= n:
        flat = [n] * heads
    else:
        w = min(window, max(1, budget // 2), n, budget) if window else 0
        shares = real_shares(table, kv_heads, budget - w, rho_min, rounding == "nearest")
        if rounding == "nearest":
            counts = [int(torch.round(torch.tensor(float(share), dtype=torch.float64))) for share in shares]
            counts = [min(count, n - w) for count in counts]
        else:
            whole = Fraction(math.floor(sum(shares)))  # the budget; the floors alone may add up to a broken number
            shares = [share * whole / sum(shares) if sum(shares) else share for share in shares]
            if surplus == "redistribute":
                counts = rounded(poured(shares, n - w))
            else:
                counts = [min(count, n - w) for count in rounded(shares)]
        flat = [count + w for count in counts]
    return [flat[layer * kv_heads : (layer + 1) * kv_heads] for layer in range(len(table))]


def hits(rows: Tensor, regions: list[list[int]]) -> list[float]:
    """Visual head score of one layer in one sample.

    Args:
        rows: attention float64 [Hq,n,S] of the rows that the n answer tokens follow, causal, softmax over S keys.
        regions: per row the keys that show what the answer token was read from.
    """
    found = []
    for head in rows.tolist():
        score = 0.0
        for row, region in zip(head, regions, strict=True):
            best = max(range(len(row)), key=lambda key: (row[key], -key))
            score += 1 / len(region) if best in region else 0
        found.append(score)
    return found

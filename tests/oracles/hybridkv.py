"""HybridKV (arXiv 2604.05887) in loops and float64, from its equations and the method sheet's settled points."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
from torch import Tensor


def attention(query: Tensor, key: Tensor, scaling: float, position: int) -> list[float]:
    """Equation 2 for one row: softmax over keys 0..position. query [D], key [T,D]."""
    scores = [scaling * s for s in (key[: position + 1].double() @ query.double()).tolist()]
    largest = max(scores)
    e = [math.exp(s - largest) for s in scores]
    return [x / math.fsum(e) for x in e]


def sparsity(query: Tensor, key: Tensor, types: list[int], scaling: float, top: Fraction = Fraction(1, 20)):
    """Equation 3 per KV head: query [Hq,T,D], key [Hkv,T,D] -> list of floats. A prompt without text counts all rows."""
    heads, total = key.shape[:2]
    group, k = query.shape[0] // heads, math.ceil(top * total)
    rows = [i for i in range(total) if types[i] == 0] or list(range(total))
    found = []
    for h in range(heads):
        sums = []
        for member in range(h * group, (h + 1) * group):
            for i in rows:
                probabilities = sorted(attention(query[member, i], key[h], scaling, i), reverse=True)
                sums.append(math.fsum(probabilities[:k]) if i >= k else 1.0)
        found.append(math.fsum(sums) / len(sums))
    return found


def window_sums(query: Tensor, key: Tensor, scaling: float, w: int) -> list[list[float]]:
    """Equations 6 and 7 per KV head, mean over its query heads."""
    heads, total = key.shape[:2]
    group = query.shape[0] // heads
    found = [[0.0] * total for _ in range(heads)]
    for member in range(query.shape[0]):
        for i in range(total - w, total):
            for j, p in enumerate(attention(query[member, i], key[member // group], scaling, i)):
                found[member // group][j] += p / group
    return found


def dynamic(scores: list[list[float]], theta: float, threshold: str = "absolute", classes: str = "hybrid"):
    """scores [L][Hkv] -> bool [L][Hkv]."""
    if classes != "hybrid":
        return [[classes == "dynamic"] * len(row) for row in scores]
    cut = theta if threshold == "absolute" else float(numpy.quantile(numpy.array(scores), theta))
    return [[not s >= cut for s in row] for row in scores]


def fill(weights: list[Fraction], total: int, cap: int) -> list[int]:
    """Proportional shares, none above cap, whole: raise a common level by bisection-free exact steps."""
    if not weights:
        return []
    full: set[int] = set()
    while True:
        rest = total - cap * len(full)
        live = sum(w for i, w in enumerate(weights) if i not in full)
        shares = [Fraction(cap) if i in full else rest * w / live for i, w in enumerate(weights)]
        over = {i for i, share in enumerate(shares) if share > cap}
        if not over:
            break
        full |= over
    counts = [math.floor(share) for share in shares]
    while sum(counts) < total:
        lack = [share - count for share, count in zip(shares, counts, strict=True)]
        counts[lack.index(max(lack))] += 1
    return counts


def rounded(share: int, n: int, chunk: int, power: str, most: Fraction) -> int:
    """What a dynamic head reads per step; `most` is what the whole budget leaves each of them at the utmost."""
    if share >= n:
        return n
    if share == 0:
        return 0

    def read(entries: int) -> int:
        whole = [m * chunk for m in range(entries // chunk + 1)][-1]
        return min(whole or entries, n)

    powers = [2**i for i in range(40)]
    if power == "none":
        return read(share)
    if power == "up":
        return read(min(p for p in powers if p >= share))
    lower = max(p for p in powers if p <= share)
    if power == "down":
        return read(lower)
    closest = min(powers, key=lambda p: (abs(p - share), p))
    return read(closest if read(closest) <= most else lower)


def budgets(
    scores, is_dynamic, budget: int, n: int, r: Fraction, alpha: Fraction, chunk: int = 8, power: str = "nearest"
):
    """Equations 4 and 5 with exact totals: entries [L][Hkv]."""
    cells = [(i, h) for i, row in enumerate(scores) for h in range(len(row))]
    moving = [c for c in cells if is_dynamic[c[0]][c[1]]]
    fixed = [c for c in cells if c not in moving]
    total = budget * len(cells)
    got = dict.fromkeys(cells, 0)
    to_dynamic = 0
    if moving:
        mean = Fraction(total, len(cells))
        to_dynamic = min(math.ceil(r * mean * len(moving)), total) if fixed else total
        while total - to_dynamic > n * len(fixed):  # static heads cannot hold what is left
            to_dynamic += 1
        for c in moving:
            got[c] = rounded(to_dynamic // len(moving), n, chunk, power, Fraction(total, len(moving)))
    if fixed:
        to_static = max(total - sum(got.values()), 0)
        norm = sum(Fraction(scores[i][h]) for i, h in fixed)
        weights = [alpha / len(fixed) + (1 - alpha) * Fraction(scores[i][h]) / norm for i, h in fixed]
        for c, count in zip(fixed, fill(weights, min(to_static, n * len(fixed)), n), strict=True):
            got[c] = count
    return [[got[i, h] for h in range(len(row))] for i, row in enumerate(scores)]


def kept(sums: list[float], cap: int, w: int, types: list[int], n: int) -> list[int]:
    """Static head, appendix A: window, historical text (the most recent if it does not fit), top-M visual tokens.

    sums, types: of the whole prompt; n: candidates, T or T - 1.
    """
    total = len(types)
    chosen = [j for j in range(n) if j >= total - w][-cap:] if cap else []
    text = [j for j in range(n) if types[j] == 0 and j < total - w]
    room = cap - len(chosen)
    chosen += text[len(text) - room :] if len(text) > room else text
    room = cap - len(chosen)
    visual = sorted((j for j in range(n) if types[j] > 0 and j < total - w), key=lambda j: (-sums[j], j))
    return sorted(chosen + visual[:room])


def chunks(query: Tensor, key: Tensor, entries: int, chunk: int, partial: str = "ranked") -> list[int]:
    """Dynamic head, one step: token indices that are read.

    query [g, rows, D]: the step's queries of the head's group; key [n, D]: all candidates. entries: the head's budget.
    """
    n = key.shape[0]
    if entries == 0:
        return []
    size = min(chunk, entries)
    pages = [list(range(start, min(start + size, n))) for start in range(0, n, size)]
    if entries >= n:
        return list(range(n))
    relevance = []
    for page in pages:
        mean = sum(key[j].double() for j in page) / len(page)
        products = [float(query[g, i].double() @ mean) for g in range(query.shape[0]) for i in range(query.shape[1])]
        relevance.append(math.fsum(products) / len(products))
    order = sorted(range(len(pages)), key=lambda c: (-relevance[c], c))
    if partial == "visible" and len(pages[-1]) < size:
        order = [len(pages) - 1] + [c for c in order if c != len(pages) - 1]
    return sorted(j for c in order[: entries // size] for j in pages[c])

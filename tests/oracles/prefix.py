"""PrefixKV, ElasticCache and Local from the equations of their papers: float64 or exact fractions, one loop per index.

Nothing of mmkv_bench is used. T tokens, Hq query heads, Hkv KV heads, query head h reads KV head h // (Hq / Hkv).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from torch import Tensor

Entries = list[int]  # token indices that one KV head holds, oldest first


def importance(query: Tensor, key: Tensor, scaling: float) -> list[float]:
    """I[n] = average over heads of sum_m a[m, n] (PrefixKV, section 3.2). query [Hq,T,D], key [Hkv,T,D]."""
    heads, total = query.shape[:2]
    group = heads // key.shape[0]
    out = [0.0] * total
    for h in range(heads):
        for m in range(total):
            scores = [float(query[h, m].double() @ key[h // group, j].double()) * scaling for j in range(m + 1)]
            top = max(scores)
            e = [math.exp(s - top) for s in scores]
            for n in range(m + 1):
                out[n] += e[n] / sum(e) / heads
    return out


def released_kept(scores: list[float], kept: int, sinks: int) -> list[int]:
    """What ElasticCache's release keeps of T tokens when it means to forget T - kept: one fewer than `kept`.

    The positions i of the inner tokens at which the sorting permutation's ENTRY exceeds the number to forget, besides
    the first `sinks` tokens and the last one.
    """
    total = len(scores)
    inner = scores[sinks : total - 1]
    permutation = sorted(range(len(inner)), key=lambda i: (inner[i], i))
    chosen = [i + sinks for i, entry in enumerate(permutation) if entry > total - kept]
    return list(range(sinks)) + chosen + [total - 1]


# ---------------------------------------------------------------- allocation


def cumulative(importances: list[float]) -> list[float]:
    """P[o] for o = 1/N, 2/N, ... 1 of one layer."""
    whole = math.fsum(importances)
    shares = sorted((x / whole for x in importances), reverse=True)
    return [math.fsum(shares[: o + 1]) for o in range(len(shares))]


def prefix_size(curve: list[float], p: float) -> int:
    """N * min{o | P[o] >= p}."""
    for o, value in enumerate(curve):
        if value >= p:
            return o + 1
    return len(curve)


def algorithm_1(
    curves: list[list[float]], total: Fraction, delta: Fraction, steps: int, limit: int = 64
) -> tuple[list[int], int]:
    """N * R_l at the end of the search, and its steps. total = r * L * N; delta in layers."""
    n = len(curves[0])
    p1, p2, used = 0.0, 1.0, 0
    while True:
        p = (p1 + p2) / 2
        used += 1
        sizes = [prefix_size(curve, p) for curve in curves]
        difference = sum(sizes) - total
        good = difference == 0 if steps else abs(difference) <= delta * n
        if good or used == (steps or limit):
            return sizes, used
        if difference < 0:
            p1 = p
        else:
            p2 = p


def shared(weights: list[Fraction], total: Fraction, least: int, most: int) -> list[Fraction]:
    """Proportional shares; who would be out of bounds gets the bound and the others share the rest, again and again.

    When some are too large and others too small, the side that is out by more is settled first.
    """
    shares: dict[int, Fraction] = {}
    while len(shares) < len(weights):
        free = [i for i in range(len(weights)) if i not in shares]
        rest = total - sum(shares.values())
        weight = sum(weights[i] for i in free)
        wanted = {i: rest * weights[i] / weight if weight else rest / len(free) for i in free}
        over = {i: wanted[i] - most for i in free if wanted[i] > most}
        under = {i: least - wanted[i] for i in free if wanted[i] < least}
        if not over and not under:
            shares.update(wanted)
        elif sum(over.values()) >= sum(under.values()):
            shares.update(dict.fromkeys(over, Fraction(most)))
        else:
            shares.update(dict.fromkeys(under, Fraction(least)))
    return [shares[i] for i in range(len(weights))]


def whole_entries(shares: list[Fraction]) -> list[int]:
    """One entry at a time to whoever lacks most of its share, the lower index first."""
    counts = [math.floor(share) for share in shares]
    while sum(counts) < sum(shares):
        lack = [share - count for share, count in zip(shares, counts, strict=True)]
        counts[lack.index(max(lack))] += 1
    return counts


def online_caps(curves: list[list[float]], budget: int, delta: Fraction, steps: int) -> list[int]:
    """Entries per layer of a prompt with the given P_l, `budget` per layer on average; first and last token are kept."""
    n = len(curves[0])
    if budget >= n or budget == 0:
        return [min(budget, n)] * len(curves)
    total = Fraction(budget * len(curves))
    sizes, _ = algorithm_1(curves, total, delta, steps)
    return whole_entries(shared([Fraction(size) for size in sizes], total, min(2, budget), n))


def offline_caps(grid: list[str], ratios: list[list[str]], budget: int, n: int) -> list[int]:
    """The same from a profile written as decimals: on the line between the two budgets around budget / n."""
    layers = len(ratios[0])
    if budget >= n or budget == 0:
        return [min(budget, n)] * layers
    rho = Fraction(budget, n)
    points = [(Fraction(0), [Fraction(0)] * layers)]
    points += [(Fraction(at), [Fraction(r) for r in row]) for at, row in zip(grid, ratios, strict=True)]
    points += [(Fraction(1), [Fraction(1)] * layers)]
    for (a, low), (b, high) in zip(points, points[1:], strict=False):
        if a <= rho <= b and a < b:
            kept = [x * (b - rho) / (b - a) + y * (rho - a) / (b - a) for x, y in zip(low, high, strict=True)]
            break
    return whole_entries(shared([r * n for r in kept], Fraction(budget * layers), min(2, budget), n))


def top(scores: list[float], cap: int, candidates: int, budget: int) -> list[int]:
    """First (unless the budget is one entry) and last token, then the highest scores; `candidates` < T drops the last."""
    total = len(scores)
    protected = ([0] if budget > 1 else []) + [total - 1]
    protected = [j for j in dict.fromkeys(protected) if j < candidates]
    protected = protected[len(protected) - cap :] if len(protected) > cap else protected
    others = sorted((j for j in range(candidates) if j not in protected), key=lambda j: (-scores[j], j))
    return sorted(protected + others[: cap - len(protected)])


# ---------------------------------------------------------------- merging


def by_position(kept: list[int], token: int) -> int | None:
    """argmax_u -|m - u|, the lower u of two."""
    return min(kept, key=lambda u: (abs(token - u), u), default=None)


def by_feature(kept: list[int], token: int, keys: Tensor) -> int | None:
    """argmax_u cosine of k_m and k_u, the lower u of two. keys [n,D]."""
    rows = keys.double().tolist()

    def cosine(u: int) -> float:
        lengths = math.hypot(*rows[token]) * math.hypot(*rows[u])
        return sum(a * b for a, b in zip(rows[token], rows[u], strict=True)) / lengths if lengths > 0 else 0.0

    return min(kept, key=lambda u: (-cosine(u), u), default=None)


def clusters(kept: list[int], n: int, near: Callable[[int], int | None]) -> dict[int, list[int]]:
    """T_n of every kept token n: the pruned tokens that match it."""
    found: dict[int, list[int]] = {u: [] for u in kept}
    for m in range(n):
        if m not in found and (match := near(m)) is not None:
            found[match].append(m)
    return found


def merged(entries: Tensor, groups: dict[int, list[int]]) -> Tensor:
    """Average({k_u | u in T_n and n}) for every kept token, in token order. entries [n,D] -> float64 [m,D]."""
    means = [sum(entries[u].double() for u in [n, *groups[n]]) / (1 + len(groups[n])) for n in sorted(groups)]
    return _stack(means) if means else entries.double()[:0]


def _stack(rows: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(rows)


def released_elastic(entries: Tensor, kept: list[int]) -> Tensor:
    """ElasticCache's release for one protected first token: `kept` with 0 and the last token, [n,D] -> [m,D].

    The places of pruned tokens are counted without the first token, so each brings the content of the token before it.
    """
    anchors = kept[1:-1]
    out = {u: [entries[u].double()] for u in kept}
    if anchors:
        for m in range(1, len(entries) - 1):
            if m not in kept:
                out[by_position(anchors, m - 1)].append(entries[m - 1].double())
    return _stack([sum(out[u]) / len(out[u]) for u in kept])


# ---------------------------------------------------------------- decoding


def newest(distance: int) -> Callable[[Entries, Entries], int]:
    """The entry `distance` places before the newest; in a short cache the one after the first."""

    def which(now: Entries, before: Entries) -> int:
        place = len(now) - 1 - distance
        return place if place >= 1 or distance == 0 else min(1, max(len(now) - 2, 0))

    return which


def fixed(distance: int) -> Callable[[Entries, Entries], int]:
    """Always the place that was `distance` before the end of the prompt's entries; half of them if there is none."""

    def which(now: Entries, before: Entries) -> int:
        place = len(before) - distance
        return place if place >= 1 else len(before) // 2

    return which


def window(sinks: int) -> Callable[[Entries, Entries], int]:
    """The oldest entry after the sinks."""
    return lambda now, before: min(sinks, max(len(before) - 1, 0))


def decoded(
    before: Entries,
    first: int,
    steps: int,
    which: Callable[[Entries, Entries], int],
    growth: Fraction,
    slack: int = 0,
) -> list[Entries]:
    """What the token at first, first + 1, ... sees (itself included) when one head begins with the entries `before`.

    After each token the head may hold len(before) + slack + growth * tokens so far; what is above that by a whole entry
    goes.
    """
    now, seen = list(before), []
    for step in range(1, steps + 1):
        now = now + [first + step - 1]
        seen.append(list(now))
        if int(len(now) - len(before) - slack - growth * step) > 0:
            del now[which(now, before)]
    return seen

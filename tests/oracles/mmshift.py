"""MM-ShiftKV from its equations (4) to (11) and its ablations' sentences: float64, loops, no code under test.

A token's kind is 0 for text, 1 for an image, 2 for a video. Every function takes plain numbers or tensors of one layer.
"""

from __future__ import annotations

import hashlib
import json
import math

import torch
from torch import Tensor

COPIES = 16  # of the last state, in the release's first LLaVA layers


def noise(samples: int, width: int, seed: int, identity: str, layer: int) -> Tensor:
    """The documented stream: CPU generator seeded by SHA-256 of (mmshift, seed, sample, layer), float32 draws."""
    text = json.dumps(["mmshift", str(seed), identity, layer])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") // 2
    generator = torch.Generator().manual_seed(number)
    return torch.randn((samples, width), generator=generator, dtype=torch.float32).double()


def rows_behind(kinds: list[int], modality: str, last: int, group: int) -> list[int]:
    """Which tokens the statistics of one group of proxies are taken from (table 13, and the release's last 512)."""
    window = [t for t in range(len(kinds)) if last == 0 or t >= len(kinds) - last]
    if modality == "unified":
        return window
    visual = modality == "vision" or (modality == "separate" and group % 2 == 0)
    return [t for t in window if (kinds[t] > 0) == visual] or window


def moments(hidden: Tensor, rows: list[int], statistics: str) -> tuple[list[float], list[float]]:
    """Equation (4): mean and population standard deviation of every feature, or of all values together."""
    width = hidden.shape[1]
    columns = [[float(hidden[t, e]) for t in rows] for e in range(width)]
    if statistics == "scalar":
        columns = [[value for column in columns for value in column]]
    mean = [math.fsum(c) / len(c) for c in columns]
    std = [math.sqrt(math.fsum((x - m) ** 2 for x in c) / len(c)) for c, m in zip(columns, mean, strict=True)]
    return (mean, std) if statistics == "elementwise" else (mean * width, std * width)


def states(
    hidden: Tensor,
    kinds: list[int],
    eps: Tensor,
    groups: int,
    *,
    gamma: float,
    statistics: str = "elementwise",
    centring: str = "sample",
    modality: str = "unified",
    last: int = 0,
    other_mean: list[float] | None = None,
) -> Tensor:
    """Equation (5): ``mu + gamma * sigma * eps_i`` for every proxy, float64 [N, E]."""
    count, width = eps.shape
    size = count // groups
    out = torch.zeros(count, width, dtype=torch.float64)
    if other_mean is not None and statistics == "scalar":
        other_mean = [math.fsum(other_mean) / width] * width
    known: dict[int, tuple[list[float], list[float]]] = {}
    for i in range(count):
        kind = (i // size) % 2
        if kind not in known:
            known[kind] = moments(hidden, rows_behind(kinds, modality, last, kind), statistics)
        mean, std = known[kind]
        mean = {"sample": mean, "none": [0.0] * width, "global": other_mean}[centring]
        for e in range(width):
            out[i, e] = mean[e] + gamma * std[e] * float(eps[i, e])
    return out


def probabilities(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Equation (7) for one proxy or the last query: query [Hq,D], key [Hkv,T,D] -> [Hq,T]."""
    share = query.shape[0] // key.shape[0]
    out = []
    for h in range(query.shape[0]):
        logits = [x * scaling for x in (key[h // share].double() @ query[h].double()).tolist()]
        top = max(logits)
        weight = [math.exp(x - top) for x in logits]
        total = math.fsum(weight)
        out.append([w / total for w in weight])
    return torch.tensor(out, dtype=torch.float64)


def group_masses(
    queries: Tensor,
    key: Tensor,
    scaling: float,
    groups: int,
    *,
    gqa: str = "probability",
    drop_last: bool = False,
    anchor: Tensor | None = None,
) -> Tensor:
    """Equation (8): queries [Hq,N,D] -> [Hkv, m, G, T or T - 1], m = 1 or, votes apart, the query heads of a KV head.

    With an anchor [Hkv,T] it is added to every group, which is divided by 1 + n afterwards (released code)."""
    heads, total = key.shape[:2]
    share, size = queries.shape[0] // heads, queries.shape[1] // groups
    apart = torch.zeros(heads, share, groups, total, dtype=torch.float64)
    for i in range(queries.shape[1]):
        rows = probabilities(queries[:, i], key, scaling)
        for h in range(queries.shape[0]):
            apart[h // share, h % share, i // size] += rows[h]
    mass = apart if gqa == "vote" else apart.mean(1, keepdim=True)
    if anchor is not None:
        mass = (mass + anchor[:, None, None]) / (1 + size)
    return mass[..., : total - 1] if drop_last else mass


def last_attention(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """``a_t(q_last)``, mean over a KV head's query heads: query [Hq,D] -> [Hkv,T]."""
    heads = key.shape[0]
    return probabilities(query, key, scaling).view(heads, -1, key.shape[1]).mean(1)


def summed(mass: Tensor, anchor: Tensor, lam: float) -> Tensor:
    """Table 5 without votes: what all groups give to a key, plus the anchor term of equation (11)."""
    out = lam * anchor.clone()
    out[:, : mass.shape[-1]] += mass.sum((1, 2))
    return out


def ranked(votes: list[float], anchor: list[float], lam: float) -> list[int]:
    """Equation (11) as an order: votes plus lambda times anchor in double precision, then (with an anchor term at all) the
    anchor itself, then the lower index."""
    second = anchor if lam > 0 else [0.0] * len(votes)
    return sorted(range(len(votes)), key=lambda t: (-(votes[t] + lam * anchor[t]), -second[t], t))

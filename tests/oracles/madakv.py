"""MadaKV as section 17 of the method sheet has it: loops over heads, tokens and layers, exact fractions, no shared code."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def proxy_mass(query: Tensor, key: Tensor, scaling: float, proxies: int) -> Tensor:
    """psi ``[Hkv, T]``: attention of the last P of the queries ``[Hq, T, D]``, mean over them and over a KV head's group."""
    kv_heads, length = key.shape[:2]
    group, rows = query.shape[0] // kv_heads, min(proxies, length)
    psi = torch.zeros(kv_heads, length, dtype=torch.float64)
    for h in range(query.shape[0]):
        for j in range(length - rows, length):
            logits = [float(query[h, j].double() @ key[h // group, i].double()) * scaling for i in range(j + 1)]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for i, weight in enumerate(weights):
                psi[h // group, i] += weight / math.fsum(weights) / (rows * group)
    return psi


def covering(masses: list[float], theta: str) -> int:
    """The fewest tokens that hold theta of the sum."""
    goal, held, count = Fraction(theta) * sum(map(Fraction, masses)), Fraction(0), 0
    for mass in sorted(masses, reverse=True):
        if held >= goal:
            break
        held, count = held + Fraction(mass), count + 1
    return count


def need(psi: list[float], types: list[int], theta: str) -> int:
    """k_v + k_t of one head."""
    visual = [m for m, kind in zip(psi, types, strict=True) if kind]
    text = [m for m, kind in zip(psi, types, strict=True) if not kind]
    return covering(visual, theta) + covering(text, theta)


def nearest(x: Fraction) -> int:
    """Halves up."""
    return math.floor(x + Fraction(1, 2))


def layer_budgets(head_needs: list[list[int]], budget: int, candidates: int, granted: bool) -> list[int]:
    """The recurrence, layer l = 1 .. L, with phi clipped to [1, n]. ``head_needs[l][h]`` = k_v + k_t."""
    layers = len(head_needs)
    if budget >= candidates:
        return [candidates] * layers
    least = 1 if budget else 0
    phi, spent, caps = Fraction(budget), 0, []
    for l, needs in enumerate(head_needs, 1):  # noqa: E741 - the formula's letter
        rest = layers - l
        mine = phi
        over = sum(needs) - len(needs) * phi  # K_l
        if granted and rest:
            mine = phi + over / len(needs)
        cap = max(least, min(candidates, nearest(mine)))
        cap = min(cap, budget * layers - spent - rest * least)  # every layer behind keeps its least
        if granted:  # what the layers behind could not hold has to be held here
            cap = max(cap, budget * layers - spent - rest * candidates)
        spent += cap
        caps.append(cap)
        if rest and granted:
            phi = phi - (cap - phi) / rest  # K_l / H as it was really granted, clipping and rounding included
        elif rest:
            phi = max(Fraction(1), min(Fraction(candidates), phi - over / len(needs) / rest))
    return caps


def quota(psi: list[float], types: list[int], cap: int) -> tuple[int, int]:
    """(phi_v, phi_t) of a head that was granted ``cap`` entries."""
    n_visual = sum(1 for kind in types if kind)
    n_text = len(types) - n_visual
    visual = sum(Fraction(m) for m, kind in zip(psi, types, strict=True) if kind)
    text = sum(Fraction(m) for m, kind in zip(psi, types, strict=True) if not kind)
    if visual + text == 0:
        visual, text = Fraction(n_visual), Fraction(n_text)
    phi_v = nearest(cap * visual / (visual + text)) if cap else 0
    phi_t = cap - phi_v
    while phi_v > n_visual:
        phi_v, phi_t = phi_v - 1, phi_t + 1
    while phi_t > n_text:
        phi_v, phi_t = phi_v + 1, phi_t - 1
    return phi_v, phi_t


def keep(psi: list[float], types: list[int], cap: int) -> list[int]:
    """The best phi_v visual and phi_t text tokens, in the order of the prompt."""
    phi_v, phi_t = quota(psi, types, cap)
    best = sorted(range(len(psi)), key=lambda j: (-psi[j], j))
    return sorted([j for j in best if types[j]][:phi_v] + [j for j in best if not types[j]][:phi_t])

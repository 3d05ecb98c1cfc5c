"""Order entries by their scores: break ties, find a covering set without sorting, and gather entries by slot."""

from __future__ import annotations

from typing import Literal

from mmkv_bench.compression.lazy_torch import Tensor, torch


def break_ties(score: Tensor, breaker: Tensor) -> Tensor:
    """Return float64 scores that order the entries by (score, breaker). Entries that are equal in both stay equal.

    Entries with equal scores are separated by the smallest steps of float64, in the order of ``breaker``. An entry
    moves by at most as many steps as there are entries, each about 1e-16 of the score, and passes another score only if
    that is so near. Every other score is returned bit for bit.

    Args:
        score: float64, 0 or more; all entries are ordered together, whatever the shape.
        breaker: of the same shape.
    """
    flat, second = score.flatten(), breaker.flatten()
    order = second.argsort(stable=True)
    order = order[flat[order].argsort(stable=True)]
    lower_order, upper_order = order[:-1], order[1:]
    differ = (flat[lower_order] != flat[upper_order]) | (second[lower_order] != second[upper_order])
    group_start = torch.nn.functional.pad(differ.cumsum(0), (1, 0))
    # Non-negative floats order like their bit patterns: no entry may come below the one before it, plus one if they differ.
    bits = flat[order].view(torch.int64)
    separated = torch.empty_like(bits)
    separated[order] = (bits - group_start).cummax(0).values + group_start
    return torch.where(score.isfinite(), separated.view(torch.float64).view_as(score), score)


HALVINGS = 10  # of the interval around the threshold; leaves a few undecided keys per row


def _mass_above(mass: Tensor, bits: Tensor, threshold: Tensor) -> Tensor:
    # A product with 0 or 1, here and below, gives what `torch.where` would, in a third of the time on a CPU.
    return (mass * (bits > threshold.unsqueeze(-1))).sum(-1, dtype=torch.float64)


def nucleus(mass: Tensor, tau: float, cover: Literal["left", "right"] = "left") -> Tensor:
    """Return each row's covering set as a mask, bool ``[..., T]``.

    With keys sorted by falling mass (equal masses: lower index first) and ``cum`` their cumulative mass, "left" takes
    the first ``searchsorted(cum, tau * total, left) + 1`` keys: the smallest set whose mass reaches ``tau * total``.
    "right" takes ``searchsorted(cum, tau * total, right)`` keys: one key fewer unless the mass is met exactly, and no
    key when the first one alone exceeds it.

    The threshold, the smallest mass in the set, is found without sorting all keys. Non-negative floats order like their
    bit patterns, so the interval of bit patterns around the threshold is halved a few times, each time with one masked
    sum. Only the few keys still inside are then sorted. Sums are float64.

    Args:
        mass: float32 ``[..., T]``, contiguous, non-negative, each row with a positive sum.
        tau: fraction of the mass to cover, in (0, 1].
        cover: "left" or "right".
    """
    bits = mass.view(torch.int32)
    total = mass.sum(-1, dtype=torch.float64)
    target = tau * total
    # Keys of at most (1 - tau) * total / T cannot be needed: all of them together weigh too little. Half of that bound
    # leaves room for rounding. Throughout: mass above `low` >= target > mass above `high`.
    low = ((1 - tau) * total / (2 * mass.shape[-1])).float().view(torch.int32)
    high = bits.amax(-1)
    for _ in range(HALVINGS):
        middle = low + (high - low) // 2
        enough = _mass_above(mass, bits, middle) >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    above = _mass_above(mass, bits, high)
    undecided = (bits > low.unsqueeze(-1)) & (bits <= high.unsqueeze(-1))
    undecided_count = undecided.sum(-1, keepdim=True)
    # Equal masses may come in any order here: only the threshold's value is read off.
    candidates = (mass * undecided).topk(int(undecided_count.amax()), -1).values
    reached = candidates.double().cumsum(-1) + above.unsqueeze(-1)
    last_rank = torch.searchsorted(reached, target.unsqueeze(-1)).minimum(undecided_count - 1)
    threshold = candidates.gather(-1, last_rank)
    above = above.unsqueeze(-1) + (candidates * (candidates > threshold)).sum(-1, keepdim=True, dtype=torch.float64)
    # How many of the keys AT the threshold belong to the set; the lower indices do.
    needed_count = (target.unsqueeze(-1) - above) / threshold.double()
    needed_count = needed_count.ceil().clamp_min(1) if cover == "left" else needed_count.floor()
    at_threshold = mass == threshold
    return (mass > threshold) | (at_threshold & (at_threshold.cumsum(-1, dtype=torch.int32) <= needed_count))


def at_slots(entries: Tensor, index: Tensor) -> Tensor:
    """Return the entries ``[H, n, D]`` at the slots ``index [H, m]`` (int64 from 0 to n - 1): ``[H, m, D]``.

    ``entries.gather(1, ...)`` with an expanded index is two to three times as slow on a CPU: it looks up every number.
    """
    heads = torch.arange(len(index), device=index.device)
    return entries[heads[:, None], index]

"""Merging by position: every pruned entry is averaged into the nearest kept entry."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.ordering import at_slots
from mmkv_bench.compression.parameter_checks import check_least
from mmkv_bench.compression.reducers.base import Reducer


@dataclass(frozen=True)
class PositionMerge(Reducer):
    """ElasticCache (arXiv 2407.18121) and PrefixKV's ablation "Position" (arXiv 2412.03409, table 12).

    Pruned token m goes to the kept token ``n = argmin |m - n|`` of its head (equal distances: the lower n), and
    ``k_n = mean({k_n} and all k_m assigned to n)``; values likewise. ElasticCache describes this as cutting the
    sequence at the midpoints between kept tokens (its anchors) and replacing each bucket by its mean. Keys are averaged
    as they are cached, with the rotation of their own positions; the merged entry counts at the kept token's position.
    Extra memory: one float32 copy of a layer's keys or values.

    Args:
        shift: pruned token m is merged with the content of token ``m - shift``, and into the kept token nearest to that
            token (0 or more tokens). 0 in the papers. ElasticCache's release forgets its offset of one protected first
            token: 1.
        closed: number of kept candidates at each end of a head that receive nothing [entries], 0 in the papers. In the
            release the protected first and last token receive nothing: 1 (the token that ``strict`` feeds again never
            receives anything).

    Paper and code: ``shift=1, closed=1`` is the release's arithmetic. The release crashes when only the two protected
    tokens are kept; here nothing is merged then.
    """

    shift: int = 0
    closed: int = 0
    merges = True

    def __post_init__(self) -> None:
        check_least(self, 0, "tokens", "shift", "closed")

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        slot_by_token, pruned = pruned_places(index, key.shape[1])
        source = (slot_by_token - self.shift).clamp_min(0)
        anchors = index[:, : max(0, index.shape[1] - self.closed)]
        anchors = anchors.masked_fill((anchors >= 0).cumsum(1) <= self.closed, -1)
        target = nearest_kept(anchors, source)
        merged = pruned & (slot_by_token >= self.shift) & (target < anchors.shape[1])
        target = torch.where(merged, target, index.shape[1])
        return cluster_means(key, index, source, target), cluster_means(value, index, source, target)


def nearest_kept(index: Tensor, where: Tensor) -> Tensor:
    """Return for each position the slot of the nearest kept token; equal distances: the lower token.

    Args:
        index: int64 ``[Hkv, m]`` kept tokens, ascending, LEFT-padded with -1.
        where: int64 ``[Hkv, k]`` token positions, 0 or more.

    Returns:
        int64 ``[Hkv, k]``: columns of ``index``; m where a head keeps nothing.
    """
    slots = index.shape[1]
    if slots == 0:
        return torch.zeros_like(where)
    right_slot = torch.searchsorted(index.contiguous(), where.contiguous())  # first kept token at or after the place
    left_slot = right_slot - 1
    right_place = index.gather(1, right_slot.clamp_max(slots - 1))
    previous = index.gather(1, left_slot.clamp_min(0))
    has_left = (left_slot >= 0) & (previous >= 0)
    has_right = right_slot < slots
    takes_left = has_left & (~has_right | (where - previous <= right_place - where))
    return torch.where(takes_left, left_slot, torch.where(has_right, right_slot, slots))


def cluster_means(entries: Tensor, index: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Average every kept entry with the entries that are merged into it; sums in float32.

    Args:
        entries: ``[Hkv, n, D]``.
        index: int64 ``[Hkv, m]`` kept tokens, LEFT-padded with -1.
        source: int64 ``[Hkv, k]`` tokens to merge.
        target: int64 ``[Hkv, k]`` the column of ``index`` that each of these tokens is merged into, m for none.

    Returns:
        ``[Hkv, m, D]`` in the dtype of ``entries``: ``(kept + sum of merged) / (1 + number of merged)``, zeros in
            padding. An entry that nothing is merged into comes back bit for bit.
    """
    heads, slots = index.shape
    dim = entries.shape[-1]
    kept_entries = at_slots(entries, index.clamp_min(0))
    none = kept_entries.new_zeros(heads, 1, dim, dtype=torch.float32)
    sums = torch.cat([kept_entries.float(), none], 1)
    count = torch.ones(heads, slots + 1, dtype=torch.float32, device=entries.device)
    count.scatter_add_(1, target, torch.ones_like(target, dtype=torch.float32))
    merged = at_slots(entries, source).float()
    sums.scatter_add_(1, target.unsqueeze(-1).expand(-1, -1, dim), merged)
    means = (sums / count.unsqueeze(-1))[:, :slots].to(entries.dtype)
    return means.masked_fill_((index < 0).unsqueeze(-1), 0)


def pruned_places(index: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Return the indices of all n candidates, int64 ``[Hkv, n]``, and which are not in ``index``: bool ``[Hkv, n]``."""
    all_places = torch.arange(candidates, device=index.device).expand(index.shape[0], -1)
    pruned = torch.ones(index.shape[0], candidates + 1, dtype=torch.bool, device=index.device)
    pruned.scatter_(1, index.masked_fill(index < 0, candidates), False)
    return all_places, pruned[:, :candidates]

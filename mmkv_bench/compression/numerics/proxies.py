"""Attention mass of groups of proxy queries, one tile at a time; votes of their covering sets, or the total mass.

If the device runs fused kernels (``fused.py``), they replace the row blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from mmkv_bench import devices
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import exponentials
from mmkv_bench.compression.numerics.ordering import nucleus
from mmkv_bench.compression.numerics.tiles import head_blocks, row_blocks


def group_mass(
    query: Tensor,
    key: Tensor,
    scaling: float,
    groups: int,
    *,
    per_query_head: bool = False,
    rounding: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the attention mass of each group of proxies, in blocks of consecutive groups.

    Proxies are queries that stand for those of decoding. They follow the prompt, so each sees every key and no mask is
    needed. Proxy i belongs to group i // n, n = N / G. A group's mass is the softmax over all T keys, summed over its
    proxies.

    Args:
        query: ``[Hq, N, D]``, rotated, N divisible by ``groups``.
        key: ``[Hkv, T, D]``.
        groups: G.
        per_query_head: keep query heads separate; otherwise their mean over a KV head's g query heads.
        rounding: dtype that probabilities, head means and group sums are rounded to; None: no rounding. Results stay
            float32. No fused kernel is used then: a changed last digit could be rounded the other way.
        scaling, sinks: see ``attention.py``.

    Yields:
        float32 ``[Hkv, m, b, T]`` for b groups, m = g with ``per_query_head``, else 1.
    """
    if _runs_fused(key, rounding):
        yield from _fused_group_mass(query, key, scaling, groups, per_query_head, sinks)
        return
    heads, total, dim = key.shape
    keys = key.float().transpose(1, 2)
    query = query.view(heads, -1, groups, query.shape[1] // groups, dim)  # [Hkv, g, G, n, D]
    share, size = query.shape[1], query.shape[3]
    for first, last in row_blocks(groups, heads * share * size * total, key.device):
        b = last - first
        mass = torch.zeros(heads, share if per_query_head else 1, b, total, dtype=torch.float32, device=key.device)
        # One pass over the group's rows, unless a single group is larger than a tile.
        for start, end in row_blocks(size, heads * share * b * total, key.device):
            block = query[:, :, first:last, start:end].reshape(heads, -1, dim).float() * scaling
            scores = torch.bmm(block, keys).view(heads, share, b, end - start, total)
            at_rows = None if sinks is None else sinks.view(heads, share, 1, 1).expand(scores.shape[:-1])
            weight = exponentials(scores, masked=False, sinks=at_rows)
            if rounding is not None:
                scores *= weight.unsqueeze(-1)
                scores = scores.to(rounding).float()
                if not per_query_head:
                    scores = scores.mean(1, keepdim=True).to(rounding).float()
                mass += scores.sum(3)
                continue
            # Multiplying by the softmax factors sums over rows without a normalised copy of the tile.
            sums = torch.matmul(weight.unsqueeze(-2), scores).squeeze(-2)  # [Hkv, g, b, T]
            mass += sums if per_query_head else sums.mean(1, keepdim=True)
        yield mass if rounding is None else mass.to(rounding).float()


def _runs_fused(key: Tensor, rounding: torch.dtype | None) -> bool:
    return rounding is None and devices.at(key.device).fuses


def _fused_group_mass(
    query: Tensor, key: Tensor, scaling: float, groups: int, apart: bool, sinks: Tensor | None
) -> Iterator[Tensor]:
    """Yield ``group_mass`` computed by kernels, in blocks of groups whose mass fits one tile."""
    from mmkv_bench.compression.numerics import fused

    size = query.shape[1] // groups
    width = (query.shape[0] if apart else key.shape[0]) * key.shape[1]
    for first, last in row_blocks(groups, width, key.device):
        yield fused.group_mass(query[:, first * size : last * size], key, scaling, last - first, apart, sinks)


def adjusted_mass(
    query: Tensor,
    key: Tensor,
    scaling: float,
    groups: int,
    *,
    per_query_head: bool = False,
    drop_last: bool = False,
    anchor: Tensor | None = None,
    rounding: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield ``group_mass``, changed as a released code changes it before the votes.

    Args:
        query, key, scaling, groups, per_query_head, rounding, sinks: see ``group_mass``.
        drop_last: leave the last key out AFTER the softmax; its mass is lost.
        anchor: ``[Hkv, T]``, added to the mass of every group, which is then divided by 1 + n.

    Yields:
        float32 ``[Hkv, m, b, T]``, ``T - 1`` columns with ``drop_last`` (nothing when no column is left).
    """
    key_count = key.shape[1] - int(drop_last)
    if key_count == 0:
        return
    size = query.shape[1] // groups
    options: dict[str, Any] = {"per_query_head": per_query_head, "rounding": rounding, "sinks": sinks}
    for mass in group_mass(query, key, scaling, groups, **options):
        mass = mass[..., :key_count]
        if anchor is not None:
            mass = mass + anchor[:, None, None, :key_count]
            mass = mass if rounding is None else mass.to(rounding).float()
            mass = mass / (1 + size)
            mass = mass if rounding is None else mass.to(rounding).float()
        yield mass


def group_votes(
    query: Tensor,
    key: Tensor,
    scaling: float,
    groups: int,
    tau: float,
    *,
    cover: Literal["left", "right"] = "left",
    **adjust: Any,
) -> Tensor:
    """Count the groups whose covering set contains each key, float32 ``[Hkv, T]`` with integer values.

    Args:
        query, key, scaling, groups: see ``group_mass``.
        adjust: keywords of ``adjusted_mass`` (a key that ``drop_last`` leaves out gets no vote).
        tau: fraction of a group's mass that its set covers.
        cover: see ``nucleus``.
    """
    votes = torch.zeros(key.shape[:2], dtype=torch.float32, device=key.device)
    for heads, mass in _by_heads(query, key, scaling, groups, **adjust):
        votes[heads, : mass.shape[-1]] += _cover_votes(mass.contiguous(), tau, cover)
    return votes


def _cover_votes(mass: Tensor, tau: float, cover: Literal["left", "right"]) -> Tensor:
    """Count the covering sets of a head that contain each key, ``[Hkv, T]``."""
    if devices.at(mass.device).fuses:
        from mmkv_bench.compression.numerics import fused

        return fused.cover_votes(mass, tau, cover == "left")
    return nucleus(mass, tau, cover).sum((1, 2))


def total_mass(query: Tensor, key: Tensor, scaling: float, groups: int, **adjust: Any) -> Tensor:
    """Return the mass that each key receives from all groups together, float32 ``[Hkv, T]``, without sets and votes.

    Arguments: see ``group_mass`` and ``adjusted_mass`` (``adjust``).
    """
    total = torch.zeros(key.shape[:2], dtype=torch.float32, device=key.device)
    for heads, mass in _by_heads(query, key, scaling, groups, **adjust):
        total[heads, : mass.shape[-1]] += mass.sum((1, 2))
    return total


def _by_heads(
    query: Tensor,
    key: Tensor,
    scaling: float,
    groups: int,
    *,
    anchor: Tensor | None = None,
    sinks: Tensor | None = None,
    **adjust: Any,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (KV heads, ``adjusted_mass`` of these heads), a few heads at a time; a fused kernel takes all at once."""
    share = query.shape[0] // key.shape[0]
    uses_kernel = _runs_fused(key, adjust.get("rounding"))
    together = head_blocks(key.shape[0], share * key.shape[1], key.device)
    for first, last in [(0, key.shape[0])] if uses_kernel else together:
        anchors = None if anchor is None else anchor[first:last]
        members = slice(first * share, last * share)
        block_arguments = {"anchor": anchors, "sinks": None if sinks is None else sinks[members], **adjust}
        for mass in adjusted_mass(query[members], key[first:last], scaling, groups, **block_arguments):
            yield slice(first, last), mass

"""The streaming attention statistics by fused kernels, for devices that run Triton (``Device.fuses``).

They compute the same as the row blocks in ``attention.py`` and ``proxies.py``, which choose between the two: float32
sums of a softmax in float32, whatever the inputs' dtype. Beyond its result a statistic needs memory for two numbers per
query row. Each statistic is a torch operation, so that code that counts memory without a device (fake tensors) knows
its result and starts no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmkv_bench import devices

PROGRAMS = 512
"""Rough number of programs that work at once: if there are fewer rows, several programs share a row's keys."""
TILE_BYTES = 2**14
"""Bytes of one tile of queries or keys: several tiles fit the shared memory of every device that runs bfloat16."""
BLOCK = 4096
"""Masses of a row that a program reads at once."""
_OPTIONS = {"enable_fp_fusion": True}  # explicit: the default changes in Triton 3.10
_LIBRARY = torch.library.Library("mmkv_bench", "FRAGMENT")  # not `custom_op`, whose first call imports torch's compiler


def _register(schema: str, empty: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Return a decorator that registers a function as a torch operation.

    empty: function that returns an empty result of the right shape and dtype, for fake tensors.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mmkv_bench::{name}", empty, lib=_LIBRARY)
        operation: Callable[..., Tensor] = getattr(torch.ops.mmkv_bench, name)
        return operation

    return register


def _empty_mass(
    query: Tensor, key: Tensor, scaling: float, groups: int, apart: bool, sinks: Tensor | None = None
) -> Tensor:
    heads, seen, _ = key.shape
    return key.new_empty((heads, query.shape[0] // heads if apart else 1, groups, seen), dtype=torch.float32)


@_register(
    "column_sums(Tensor query, Tensor key, float scaling, int offset, Tensor? sinks) -> Tensor",
    lambda query, key, scaling, offset, sinks: key.new_empty(key.shape[:2], dtype=torch.float32),
)
def column_sums(query: Tensor, key: Tensor, scaling: float, offset: int, sinks: Tensor | None) -> Tensor:
    """Return ``attention.column_sums``, computed by a kernel."""
    from mmkv_bench.compression.numerics import fused_kernels as kernels

    query, key = _contiguous_rows(query), _contiguous_rows(key)
    heads, seen, _ = key.shape
    shape = _kernel_constants(query, key, query.shape[1])
    numbers = _scale_and_strides(query, key, scaling)
    sums = torch.empty(heads, seen, dtype=torch.float32, device=key.device)
    with devices.at(key.device).current():
        peak, weight = _softmax(query, key, scaling, shape, offset, sinks)
        grid = (-(-seen // shape["KEYS"]), heads)
        kernel_arguments = (query, key, peak, weight, sums, query.shape[1], seen, offset, *numbers)
        kernels.column_sums[grid](*kernel_arguments, **shape, **_OPTIONS)
    return sums


@_register(
    "group_mass(Tensor query, Tensor key, float scaling, int groups, bool apart, Tensor? sinks) -> Tensor", _empty_mass
)
def group_mass(query: Tensor, key: Tensor, scaling: float, groups: int, apart: bool, sinks: Tensor | None) -> Tensor:
    """Return ``proxies.group_mass`` of all groups, ``[Hkv, m, G, T]``.

    apart: query heads stay separate, and m = g; otherwise they are averaged, and m = 1.
    """
    from mmkv_bench.compression.numerics import fused_kernels as kernels

    query, key = _contiguous_rows(query), _contiguous_rows(key)
    heads, seen, _ = key.shape
    count, share = query.shape[1], query.shape[0] // heads
    size = count // groups
    shape = _kernel_constants(query, key, size)
    numbers = _scale_and_strides(query, key, scaling)
    mass = _empty_mass(query, key, scaling, groups, apart)
    with devices.at(key.device).current():
        peak, weight = _softmax(query, key, scaling, _kernel_constants(query, key, count), None, sinks)
        grid = (-(-seen // shape["KEYS"]), groups, heads * mass.shape[1])
        members = share // mass.shape[1]
        kernel_arguments = (query, key, peak, weight, mass, count, seen, size, *numbers)
        kernels.group_mass[grid](*kernel_arguments, MEMBERS=members, **shape, **_OPTIONS)
    return mass


@_register(
    "cover_votes(Tensor mass, float tau, bool left) -> Tensor",
    lambda mass, tau, left: mass.new_empty((mass.shape[0], mass.shape[-1])),
)
def cover_votes(mass: Tensor, tau: float, left: bool) -> Tensor:
    """Count the covering sets of a head that contain each key, float32 ``[Hkv, T]``; see ``ordering.nucleus``.

    Args:
        mass: float32 ``[Hkv, m, b, T]``, contiguous.
        tau: fraction of the mass that a set covers.
        left: whether ``cover`` is "left".
    """
    from mmkv_bench.compression.numerics import fused_kernels as kernels

    heads, width = mass.shape[0], mass.shape[-1]
    mass_rows = mass.view(-1, width)
    target = tau * mass_rows.sum(-1, dtype=torch.float64)
    highest = mass_rows.amax(-1).view(torch.int32)
    threshold = torch.empty(len(mass_rows), dtype=torch.float32, device=mass.device)
    last_indices = torch.empty(len(mass_rows), dtype=torch.int32, device=mass.device)
    mask = torch.empty(heads, width, dtype=torch.float32, device=mass.device)
    block = min(BLOCK, _power(width))
    with devices.at(mass.device).current():
        kernel_arguments = (mass_rows, target, highest, threshold, last_indices, width)
        kernels.covering_set[len(mass_rows),](*kernel_arguments, LEFT=left, BLOCK=block, num_warps=8, **_OPTIONS)
        block_size = min(block, 256)
        grid = (-(-width // block_size), heads)
        kernels.votes[grid](
            mass_rows, threshold, last_indices, mask, width, len(mass_rows) // heads, BLOCK=block_size, **_OPTIONS
        )
    return mask


def _softmax(
    query: Tensor, key: Tensor, scaling: float, shape: dict[str, Any], offset: int | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each row's largest score, as exponent of 2, and 1 / its sum of exponentials: float32 ``[Hq, n]`` each.

    Args:
        offset: tokens before the first row, for causal rows; None: every row sees every key.
        sinks: ``[Hq]``, as natural exponents; a row's largest score is at least its sink.
    """
    from mmkv_bench.compression.numerics import fused_kernels as kernels

    heads, count, _ = query.shape
    seen = key.shape[1]
    blocks = -(-count // shape["ROWS"])
    max_parts = max(1, seen // (8 * shape["KEYS"]))  # a part has at least 8 tiles of keys
    parts = min(max(1, PROGRAMS // (blocks * heads)), max_parts)
    reach = -(-seen // (parts * shape["KEYS"])) * shape["KEYS"]
    peak, total = torch.empty(2, parts, heads, count, dtype=torch.float32, device=key.device)
    numbers = _scale_and_strides(query, key, scaling)
    kernel_arguments = (query, key, peak, total, count, seen, offset or 0, reach, *numbers)
    kernels.row_softmax[blocks, heads, parts](*kernel_arguments, CAUSAL=offset is not None, **shape, **_OPTIONS)
    highest = peak.amax(0)
    if sinks is None:
        return highest, (total * (peak - highest).exp2_()).sum(0).reciprocal_()
    powers = (sinks.float() * math.log2(math.e))[:, None]
    highest = torch.maximum(highest, powers)
    total = (total * (peak - highest).exp2_()).sum(0) + (powers - highest).exp2_()
    return highest, total.reciprocal_()


def _contiguous_rows(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _scale_and_strides(query: Tensor, key: Tensor, scaling: float) -> tuple[float, int, int, int, int]:
    """Return the factor that makes scores exponents of 2 (``scaling * log2 e``), and the strides of heads and rows."""
    return scaling * math.log2(math.e), query.stride(0), query.stride(1), key.stride(0), key.stride(1)


def _kernel_constants(query: Tensor, key: Tensor, rows: int) -> dict[str, Any]:
    """Return the constants for which a kernel is compiled, by name.

    rows: number of query rows that are summed together; it limits the rows of a tile.
    """
    from triton import knobs

    dim = key.shape[2]
    # Triton's interpreter multiplies the bit patterns of bfloat16; products of two of them are exact in float32.
    wide = query.dtype != key.dtype or (bool(knobs.runtime.interpret) and key.dtype == torch.bfloat16)
    depth = max(16, _power(dim))
    keys = min(64, max(16, TILE_BYTES // (depth * (4 if wide else key.element_size()))))
    return {
        "GROUP": query.shape[0] // key.shape[0],
        "DIM": dim,
        "DEPTH": depth,
        "WIDE": wide,
        "ROWS": min(keys, max(16, _power(rows))),
        "KEYS": keys,
    }


def _power(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()

"""Asymmetric quantisation of groups, really packed: KIVI's quantiser (arXiv 2402.02750, equation 1).

A group of G numbers with minimum z and range r is stored as integers ``q = round((x - z) / s)`` of b bits with
``s = r / (2^b - 1)``, and read back as ``q * s + z``. A group is always along the last axis. Scales and minima are kept
in the dtype of the input: 16 bits each for half-precision models, as the paper counts (``b + 32 / G`` bits per number).
The minimum is a number of the group itself, so that a constant group is restored exactly. The scale is rounded to that
dtype BEFORE the integers are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.errors import ConfigError

BITS = (2, 4, 8)
SMALLEST_SCALE = 1e-6  # a constant group has range 0, and 0 / 0 is NaN


@dataclass(frozen=True)
class Packed:
    """Quantised numbers ``[..., n]`` in groups of G along the last axis.

    Attributes:
        data: uint8 ``[..., n * bits / 8]``; the first number of a byte is in its lowest bits.
        scale, zero: ``[..., n / G]`` step and minimum of every group, in the dtype that ``dequantise`` returns.
        bits: bits of one number.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.data, self.scale, self.zero


def check_group(bits: int, group: int) -> None:
    """Raise ConfigError unless a group of ``group`` numbers of ``bits`` bits fills whole bytes."""
    if bits not in BITS:
        raise ConfigError(f"bits is {bits}; allowed: {', '.join(map(str, BITS))} bits per number; choose one")
    values_per_byte = 8 // bits
    if group < values_per_byte or group % values_per_byte:
        raise ConfigError(
            f"group is {group}; allowed at {bits} bits: multiples of {values_per_byte}, so that a group fills whole bytes; "
            "choose such a size, as 32"
        )


def quantise(x: Tensor, bits: int, group: int) -> Packed:
    """Quantise ``[..., n]`` in groups of ``group`` consecutive numbers of the last axis; arithmetic runs in float32.

    Raises:
        ConfigError: ``bits`` or ``group`` cannot be packed, or n is not a multiple of ``group``.
    """
    check_group(bits, group)
    if x.shape[-1] % group:
        raise ConfigError(
            f"{x.shape[-1]} numbers do not divide into groups of {group}; choose a group size that divides "
            f"{x.shape[-1]}"
        )
    groups = x.unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    steps = 2**bits - 1
    scale = ((high.float() - low.float()) / steps).clamp_min(SMALLEST_SCALE).to(x.dtype)
    above_minimum = groups.float() - low.float().unsqueeze(-1)
    level = above_minimum.div_(scale.float().unsqueeze(-1)).round_().clamp_(0, steps).to(torch.uint8)
    return Packed(_pack(level.flatten(-2), bits), scale, low, bits)


def dequantise(packed: Packed) -> Tensor:
    """Return the numbers ``[..., n]`` that ``packed`` represents, in the dtype of its scales; computed in float32."""
    level = _unpack(packed.data, packed.bits).unflatten(-1, (packed.scale.shape[-1], -1))
    number = level.float().mul_(packed.scale.float().unsqueeze(-1)).add_(packed.zero.float().unsqueeze(-1))
    return number.flatten(-2).to(packed.scale.dtype)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _pack(level: Tensor, bits: int) -> Tensor:
    groups = level.unflatten(-1, (-1, 8 // bits))
    return (groups << _shifts(bits, level.device)).sum(-1, dtype=torch.uint8)


def _unpack(data: Tensor, bits: int) -> Tensor:
    return ((data.unsqueeze(-1) >> _shifts(bits, data.device)) & (2**bits - 1)).flatten(-2)

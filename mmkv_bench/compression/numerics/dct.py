"""Orthonormal DCT-II along the tokens, and what a low-pass filter of keys or values leaves out.

``C[m] = a(m) * sum_n x[n] * cos(pi * (2n + 1) * m / (2T))`` with ``a(0) = sqrt(1 / T)`` and ``a(m) = sqrt(2 / T)``. It
is orthonormal, so the energy of the bins is that of the tokens (Parseval). One real FFT of length T does this (Makhoul
1980): with the even tokens in order followed by the odd ones in reverse, and w = exp(-i pi m / (2T)),
``sum_n ... cos = Re(w[m] * FFT[m])`` and bin T - m is ``-Im`` of the same number. So half a spectrum holds all T bins,
and the memory is a few times the input's size.

T is the prompt's own length, because padding would change the bins. Lengths with large prime factors take several times
as long as their neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.tiles import row_blocks

HELD = 4  # tensors of a block's size in memory at once


def dct(x: Tensor) -> Tensor:
    """Return the orthonormal DCT-II along the last axis. ``x [..., T]`` -> ``[..., T]``, float32 (float64 stays)."""
    length = x.shape[-1]
    spectrum = _half_spectrum(x.to(_dtype(x))[..., _order(length, x.device)])
    out = torch.cat([spectrum.real, -spectrum.imag[..., 1 : (length + 1) // 2].flip(-1)], -1)
    out *= math.sqrt(2 / length)
    out[..., 0] *= math.sqrt(0.5)
    return out


@dataclass(frozen=True)
class HighPass:
    """What a low-pass filter leaves out of ``x [H, T, D]``: the bins from omega on.

    Attributes:
        deviation: ``[H, T]`` float32 (float64 for float64 inputs), mean square over the D channels of what is left out
            of a token.
        outlier: ``[H]`` float64 on the CPU, energy of the bins ABOVE omega.
        total: ``[H]`` float64 on the CPU, energy of all bins.
    """

    deviation: Tensor
    outlier: Tensor
    total: Tensor


def high_pass(x: Tensor, omega: int) -> HighPass:
    """Low-pass every channel of ``x [H, T, D]`` to its bins m < omega, and measure the rest (see ``HighPass``).

    First, each channel's first token is subtracted from it. This changes only bin 0, which never counts, makes constant
    channels exactly 0, and prevents rounding errors from a large constant part of the keys. As many channels as fit a
    tile (``tiles.py``), at least one, are transformed at once, so extra memory is O(T).

    Args:
        x: any float dtype; computed in float32 (float64 stays).
        omega: first bin that the filter drops, 1 or more.

    Raises:
        ValueError: omega is below 1.
    """
    if omega < 1:
        raise ValueError(f"omega is {omega}; allowed: 1 or more, so that bin 0 belongs to the base")
    heads, length, dim = x.shape
    order, dtype = _order(length, x.device), _dtype(x)
    deviation = torch.zeros(heads, length, dtype=dtype, device=x.device)  # in the order of `order`, as sums
    edge = torch.zeros(heads, dtype=torch.float64, device=x.device)  # energy of bin omega
    total = torch.zeros(heads, dtype=torch.float64, device=x.device)
    turns = _quarter_turns(length, torch.empty(0, dtype=dtype.to_complex(), device=x.device))
    for start, end in row_blocks(heads, HELD * length * dim, x.device):
        for first, last in row_blocks(dim, HELD * (end - start) * length, x.device):
            block = torch.empty(end - start, last - first, length, dtype=dtype, device=x.device)
            for channels, head in zip(block, x[start:end, :, first:last], strict=True):  # a stack is copied more slowly
                channels.copy_(head.index_select(0, order).T)
            total[start:end] += _energy(block)
            if omega >= length:
                continue
            block -= block[..., :1].clone()
            spectrum = torch.fft.rfft(block)
            del block
            edge[start:end] += _drop(spectrum, turns, omega, length)
            deviation[start:end] += torch.fft.irfft(spectrum, n=length).square_().sum(1)
    # Parseval: the tokens' energy is that of the bins from omega on. Without a bin above omega, drop what rounding leaves.
    outlier = (deviation.sum(-1, dtype=torch.float64) - edge).clamp_min_(0) * (omega < length - 1)
    return HighPass(torch.empty_like(deviation).index_copy_(1, order, deviation / dim), outlier.cpu(), total.cpu())


def _drop(spectrum: Tensor, turns: Tensor, omega: int, length: int) -> Tensor:
    """Set the bins m < omega of the FFTs ``spectrum [h, D, T // 2 + 1]`` to zero, IN PLACE.

    Returns the energy of bin omega, ``[h]`` float64. Only numbers that contain a dropped bin, or bin omega, are
    converted to bins and back; all others stay bit for bit.
    """
    middle = length / 2
    frequency_slice = slice(0, omega + 1) if omega < middle else slice(None)
    spectrum[..., frequency_slice] *= turns[frequency_slice]
    real_and_imaginary = torch.view_as_real(spectrum)
    edge = real_and_imaginary[..., omega, 0] if omega <= middle else real_and_imaginary[..., length - omega, 1]
    energy = _energy(edge) * (2 / length)
    real_and_imaginary[..., :omega, 0] = 0
    real_and_imaginary[..., length - omega + 1 :, 1] = 0
    spectrum[..., frequency_slice] *= turns[frequency_slice].conj()
    return energy


def _energy(x: Tensor) -> Tensor:
    """Sum the squares of each head, ``[h, ...]`` -> ``[h]`` float64."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).double().square_()


def _order(length: int, device: torch.device) -> Tensor:
    """Return the token indices, even ones ascending, then odd ones descending."""
    index = torch.arange(length, device=device)
    return torch.cat([index[0::2], index[1::2].flip(0)])


def _half_spectrum(folded: Tensor) -> Tensor:
    """Return ``w * FFT`` of tokens in ``_order``, ``[..., T // 2 + 1]``; see the module's docstring."""
    spectrum = torch.fft.rfft(folded)
    return spectrum.mul_(_quarter_turns(folded.shape[-1], spectrum))


def _quarter_turns(length: int, like: Tensor) -> Tensor:
    angle = torch.arange(length // 2 + 1, dtype=torch.float64, device=like.device) * (-math.pi / (2 * length))
    return torch.polar(torch.ones_like(angle), angle).to(like.dtype)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32

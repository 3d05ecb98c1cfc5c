"""Orthonormal DCT-II along the tokens, and what a low-pass filter of keys or values leaves out.

``C[m] = a(m) * sum_n x[n] * cos(pi * (2n + 1) * m / (2T))`` with ``a(0) = sqrt(1 / T)`` and ``a(m) = sqrt(2 / T)``: an
orthonormal transform, so the energy of the bins is the energy of the tokens (Parseval). One real FFT of length T does
it (Makhoul 1980): with the even tokens in order followed by the odd ones in reverse, and w = exp(-i pi m / (2T)),
``sum_n ... cos = Re(w[m] * FFT[m])`` and bin T - m is ``-Im`` of the same number. Half a spectrum therefore holds all T
bins, no T x T matrix exists, and a batch of channels needs a few times its own size.

The length is the prompt's, padding excluded, so nothing may be padded to a size that an FFT prefers: lengths with large
prime factors take several times as long as their neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.numerics.tiles import row_blocks

HELD = 4  # tensors of a block's size that exist at once


def dct(x: Tensor) -> Tensor:
    """Orthonormal DCT-II of the last axis. ``x [..., T]`` -> ``[..., T]``, float32 (float64 stays)."""
    length = x.shape[-1]
    spectrum = _half_spectrum(_working(x)[..., _order(length, x.device)])
    out = torch.cat([spectrum.real, -spectrum.imag[..., 1 : (length + 1) // 2].flip(-1)], -1)
    out *= math.sqrt(2 / length)
    out[..., 0] *= math.sqrt(0.5)
    return out


def idct(bins: Tensor) -> Tensor:
    """The inverse of ``dct``: orthonormal DCT-III of the last axis, ``[..., T]`` -> ``[..., T]``."""
    length = bins.shape[-1]
    bins = _working(bins) * math.sqrt(length / 2)
    bins[..., 0] *= math.sqrt(2)
    mirrored = torch.zeros_like(bins)  # bin T - m at m; there is no bin T
    mirrored[..., 1:] = bins[..., 1:].flip(-1)
    half = length // 2 + 1
    folded = _from_half_spectrum(torch.complex(bins[..., :half], -mirrored[..., :half]), length)
    out = torch.empty_like(folded)
    out[..., _order(length, bins.device)] = folded
    return out


@dataclass(frozen=True)
class HighPass:
    """What is left of ``x [H, T, D]`` without its bins below omega.

    Attributes:
        deviation: ``[H, T]`` float32, mean square over the D channels of what the low-pass filter left out of a token.
        outlier: ``[H]`` float64 on the CPU, energy of the bins ABOVE omega; total: energy of all bins.
    """

    deviation: Tensor
    outlier: Tensor
    total: Tensor


def high_pass(x: Tensor, omega: int) -> HighPass:
    """Low-pass every channel of ``x [H, T, D]`` to its bins m < omega, and measure the rest (see ``HighPass``).

    A channel's first token is subtracted from it beforehand: that moves bin 0 alone, which never counts, leaves exact
    zeros of constant channels, and keeps a large constant part of the keys out of float32 rounding. As many channels are
    transformed at once as fit a tile (``tiles.py``), one at least, so extra memory is O(T).

    Args:
        x: any float dtype; computed in float32 (float64 stays).
        omega: first bin that the filter drops, 1 or more.
    """
    if omega < 1:
        raise ValueError(f"omega is {omega}; allowed: 1 or more, so that bin 0 belongs to the base")
    heads, length, dim = x.shape
    order = _order(length, x.device)
    deviation = torch.zeros(heads, length, dtype=_dtype(x), device=x.device)  # in the order of `order`, as sums
    outlier = torch.zeros(heads, dtype=torch.float64, device=x.device)
    total = torch.zeros(heads, dtype=torch.float64, device=x.device)
    for start, end in row_blocks(heads, HELD * length * dim, x.device):
        for first, last in row_blocks(dim, HELD * (end - start) * length, x.device):
            block = torch.empty(end - start, last - first, length, dtype=_dtype(x), device=x.device)
            block.copy_(x[start:end, :, first:last].index_select(1, order).transpose(1, 2))
            total[start:end] += torch.linalg.vector_norm(block, dim=(1, 2)).double().square_()
            if omega >= length:
                continue
            block -= block[..., :1].clone()
            spectrum = _half_spectrum(block)
            del block
            outlier[start:end] += _energies(spectrum, length)[:, omega + 1 :].sum(-1)
            parts = torch.view_as_real(spectrum)
            parts[..., :omega, 0] = 0
            parts[..., length - omega + 1 :, 1] = 0
            deviation[start:end] += _from_half_spectrum(spectrum, length).square_().sum(1)
    return HighPass(torch.empty_like(deviation).index_copy_(1, order, deviation / dim), outlier.cpu(), total.cpu())


def _energies(spectrum: Tensor, length: int) -> Tensor:
    """Half spectra ``[h, D, T // 2 + 1]`` -> energy of every bin over the D channels, ``[h, T]`` float64 (bin 0 doubled)."""
    parts = torch.view_as_real(spectrum).square().sum(1).double()
    return torch.cat([parts[..., 0], parts[:, 1 : (length + 1) // 2, 1].flip(-1)], -1) * (2 / length)


def _order(length: int, device: torch.device) -> Tensor:
    """Token indices, even ones ascending, then odd ones descending."""
    index = torch.arange(length, device=device)
    return torch.cat([index[0::2], index[1::2].flip(0)])


def _half_spectrum(folded: Tensor) -> Tensor:
    """Tokens in ``_order`` -> w * FFT, ``[..., T // 2 + 1]``: bin m is its real part, bin T - m minus its imaginary."""
    spectrum = torch.fft.rfft(folded)
    return spectrum.mul_(_quarter_turns(folded.shape[-1], spectrum))


def _from_half_spectrum(spectrum: Tensor, length: int) -> Tensor:
    """The inverse of ``_half_spectrum``; its input is overwritten."""
    return torch.fft.irfft(spectrum.mul_(_quarter_turns(length, spectrum).conj()), n=length)


def _quarter_turns(length: int, like: Tensor) -> Tensor:
    angle = torch.arange(length // 2 + 1, dtype=torch.float64, device=like.device) * (-math.pi / (2 * length))
    return torch.polar(torch.ones_like(angle), angle).to(like.dtype)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _working(x: Tensor) -> Tensor:
    return x.to(_dtype(x))

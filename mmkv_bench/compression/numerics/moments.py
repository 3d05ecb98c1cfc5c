"""Rotary embedding as a linear map, moments of streamed vectors, and the expected attention of a Gaussian query.

Running moments are float64, so that any chunking of the same tokens gives the same result up to float32 rounding.
"""

from __future__ import annotations

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.tiles import row_blocks

ROWS = 1024  # tokens converted to float64 at a time


class ElementMoments:
    """The elementwise mean and population variance of vectors ``[E]``; extra memory O(E)."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = self._squares = torch.empty(0)

    def add(self, x: Tensor) -> None:
        """Add ``x [n, E]`` of any float dtype."""
        if not len(self._sum):
            self._sum = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
            self._squares = torch.zeros_like(self._sum)
        for block in x.split(ROWS):
            block = block.to(torch.float64, copy=True)  # squared in place below
            self._sum += block.sum(0)
            self._squares += block.square_().sum(0)
        self.count += x.shape[0]

    def mean(self) -> Tensor:
        """Return the mean, ``[E]`` float64. Raises ValueError if nothing was added."""
        if self.count == 0:
            raise ValueError("moments of no rows are undefined")
        return self._sum / self.count

    def std(self) -> Tensor:
        """Return the population standard deviation (divided by n), ``[E]`` float64."""
        return (self._squares / self.count - self.mean().square()).clamp_min_(0).sqrt_()

    def scalars(self) -> tuple[Tensor, Tensor]:
        """Return mean and population std of all n*E values together, float64 ``[]`` each."""
        mean = self.mean().mean()
        return mean, ((self._squares / self.count).mean() - mean.square()).clamp_min(0).sqrt()


class JointMoments:
    """The mean ``[H, D]`` and population covariance ``[H, D, D]`` per head; extra memory O(H D^2)."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = self._products = torch.empty(0)

    def add(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> None:
        """Add vectors ``x [H, n, D]`` of any float dtype (n may be 0).

        rotation: cos, sin ``[n, D]`` of a rotation that is undone first; None: there is none.
        A few heads are added at a time, because allocating a new large temporary for every block would take as long as
        the matrix multiplications.
        """
        heads, total, dim = x.shape
        if not len(self._sum):
            self._sum = torch.zeros(heads, dim, dtype=torch.float64, device=x.device)
            self._products = torch.zeros(heads, dim, dim, dtype=torch.float64, device=x.device)
        for start in range(0, total, ROWS):
            rows = slice(start, min(start + ROWS, total))
            for first, last in row_blocks(heads, (rows.stop - start) * dim, x.device):
                block = x[first:last, rows]
                if rotation is not None:
                    block = unrotate(block, rotation[0][rows], rotation[1][rows])
                block = block.double()
                self._sum[first:last] += block.sum(1)
                self._products[first:last] += block.transpose(1, 2) @ block
        self.count += total

    def mean(self) -> Tensor:
        """Return the mean, ``[H, D]`` float64. Raises ValueError if nothing was added."""
        if self.count == 0:
            raise ValueError("moments of no rows are undefined")
        return self._sum / self.count

    def covariance(self) -> Tensor:
        """Return the population covariance (divided by n), ``[H, D, D]`` float64."""
        mean = self.mean()
        return self._products / self.count - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def average_rotation(mean: Tensor, covariance: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean ``[H, D]`` and covariance ``[H, D, D]`` of a query after the average of m rotations.

    mean, covariance: before the rotations. cos, sin: ``[m, D]`` of the rotations.
    """
    cos, sin = cos.to(mean.dtype).mean(0), sin.to(mean.dtype).mean(0)
    rows = rotate(covariance, cos, sin).transpose(-1, -2)  # rotate(x) = x R^T for rows x; R C R^T needs two
    return rotate(mean, cos, sin), rotate(rows, cos, sin).transpose(-1, -2)


def expected_logits(key: Tensor, mean: Tensor, covariance: Tensor | None, scaling: float) -> Tensor:
    """Return log E[exp(scaling * q.k)] for q ~ N(mean, covariance), float32 ``[Hkv, g, T]``.

    Args:
        key: ``[Hkv, T, D]``.
        mean: ``[Hq, D]``.
        covariance: ``[Hq, D, D]``; None leaves the second-order term out.
        scaling: factor of the scores, usually ``D ** -0.5``.
    """
    heads, total, dim = key.shape
    keys = key.float()
    mean = mean.float().view(heads, -1, dim)
    logits = torch.bmm(mean, keys.transpose(1, 2)).mul_(scaling)
    if covariance is not None:
        group = mean.shape[1]
        covariance = covariance.float().view(heads, group, dim, dim)
        for first, last in row_blocks(heads, total * group * dim, key.device):  # whole heads as far as they fit a tile
            for start, end in row_blocks(total, (last - first) * group * dim, key.device):
                block = keys[first:last, None, start:end]
                second = (block @ covariance[first:last]).mul_(block).sum(-1)
                logits[first:last, :, start:end] += second.mul_(scaling * scaling / 2)
    return logits


def _half_turn(x: Tensor) -> Tensor:
    first_half, second_half = x.chunk(2, -1)
    return torch.cat((-second_half, first_half), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R numbers of each vector of ``x [..., m, D]`` by ``cos, sin [m, R]`` (or ``[R]``), in x's dtype.

    Dimensions i and i + R/2 are paired. R is D, except for partial rotary embeddings (Qwen3.5), which leave the rest
    unchanged.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned = x[..., : cos.shape[-1]]
    turned = turned * cos + _half_turn(turned) * sin
    return turned if cos.shape[-1] == x.shape[-1] else torch.cat((turned, x[..., cos.shape[-1] :]), -1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo ``rotate``, in float32. Exact for scaled rotations too (YaRN): the scale is divided out."""
    if cos.shape[-1] < x.shape[-1]:
        return torch.cat((unrotate(x[..., : cos.shape[-1]], cos, sin), x[..., cos.shape[-1] :].float()), -1)
    x, cos, sin = x.float(), cos.float(), sin.float()
    half_width = x.shape[-1] // 2
    turned = x * cos  # in place, because it may be all prompt queries
    turned[..., :half_width] += x[..., half_width:] * sin[..., :half_width]
    turned[..., half_width:] -= x[..., :half_width] * sin[..., half_width:]
    return turned.div_(cos * cos + sin * sin)

"""Rotary position embedding as a linear map, and its exact inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


def _half_turn(x: Tensor) -> Tensor:
    import torch

    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _check(x: Tensor, cos: Tensor) -> None:
    if cos.shape[-1] != x.shape[-1]:
        raise UnsupportedError(
            f"rotary embedding covers {cos.shape[-1]} of {x.shape[-1]} head dimensions; supported: models that rotate"
            " all of them. Choose a method without future queries (snapkv, keydiff, streamingllm, random)"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [..., m, D]`` by ``cos, sin [m, D]`` (or ``[D]``), in x's dtype; halves of D are paired (i, i + D/2)."""
    _check(x, cos)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return x * cos + _half_turn(x) * sin


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo ``rotate``, in float32. Exact for scaled rotations too (YaRN): the scale is divided out."""
    _check(x, cos)
    x, cos, sin = x.float(), cos.float(), sin.float()
    half = x.shape[-1] // 2
    turned = x * cos  # of all prompt queries: in place, without a copy that is turned by half
    turned[..., :half] += x[..., half:] * sin[..., :half]
    turned[..., half:] -= x[..., :half] * sin[..., half:]
    return turned.div_(cos * cos + sin * sin)

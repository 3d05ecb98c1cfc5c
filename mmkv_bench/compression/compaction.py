"""New positions for a stream's entries after an eviction: consecutive, without gaps, up to the newest token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmkv_bench.compression.numerics.moments import rotate
from mmkv_bench.errors import UnsupportedError

Rope = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Position ids `[axes, n]` -> cos, sin `[n, D]` of a model's rotary embedding."""


class Compaction:
    """`stream.positions=compact`: kept keys are rotated to consecutive positions that end at the newest token's position.

    The distance of a query to a key is then the difference of their indices in the cache, as in StreamingLLM (arXiv
    2309.17453, section 3.2). StreamingLLM numbers a cache from 0. Here the last entry gets the newest token's position,
    and queries keep theirs. For rotary attention this is equivalent, and queries have the same positions in all heads,
    whatever each head keeps.

    With several axes (M-RoPE), a position that no kept entry of the head has on any axis is removed from every axis. So
    neighbours in a picture stay neighbours, and text is numbered as on one axis. A later picture or frame must have higher
    positions than everything before it on every axis. This holds for pictures and text, but not for the frames of some
    videos, which `generation/stream_reader.py` refuses.

    Keys are rotated by the difference, in float32, and rounded to the cache's dtype each time they move.

    Args:
        positions: int64 `[axes, T]` of the whole stream.
        rope: the model's rotary embedding.
    """

    def __init__(self, positions: Tensor, rope: Rope):
        self.positions, self.rope = positions, rope
        # by layer, int64 [axes, Hkv, m]: positions of the entries after the latest eviction
        self._moved: dict[int, Tensor] = {}

    def moves(self, layer: int, tokens: Tensor, index: Tensor) -> Tensor:
        """Assign new positions to the kept entries of a layer, and return how far each key must be rotated.

        Args:
            tokens: int64 `[Hkv, S]` each slot's token before the eviction, as its index in the stream, ascending.
            index: `[Hkv, m]` kept slots.

        Returns:
            int64 `[axes, Hkv, m]`: new position minus old position.
        """
        current = self.positions[:, tokens]
        if layer in self._moved:
            current[:, :, : self._moved[layer].shape[2]] = self._moved[layer]
        kept = current.gather(2, index.expand(len(current), *index.shape))
        newest = int(self.positions[:, : int(tokens.max()) + 1].max())
        self._moved[layer] = torch.stack([_consecutive(kept[:, head], newest) for head in range(len(index))], 1)
        return self._moved[layer] - kept

    def rotate_keys(self, keys: Tensor, moves: Tensor) -> Tensor:
        """Return keys `[Hkv, m, D]` rotated by `moves` `[axes, Hkv, m]`. Keys that do not move are returned bit for bit."""
        cos, sin = (part.float().view(*keys.shape[:2], -1) for part in self.rope(moves.flatten(1)))
        scale = (cos * cos + sin * sin).rsqrt()  # of scaled rotations (YaRN): the key has its scale already
        rotated_keys = rotate(keys.float(), cos * scale, sin * scale).to(keys.dtype)
        return torch.where((moves != 0).any(0)[..., None], rotated_keys, keys)


def _consecutive(positions: Tensor, newest: int) -> Tensor:
    """Renumber positions `[axes, m]` in their order, without gaps, so that the largest becomes `newest`."""
    values, rank = positions.unique(return_inverse=True)
    return rank + (newest + 1 - len(values))


def check_rope(config: object) -> None:
    """Raise UnsupportedError for rotary frequencies that depend on the length. config: the text model's config."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"stream.positions=compact rotates kept keys, but this model's rotary embedding (rope_type={kind}) "
            "changes its frequencies with the length; give stream.positions=kept"
        )

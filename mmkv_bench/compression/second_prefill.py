"""A second prefill in which every layer sees only kept entries, for `protocol=masked`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache, CompressedLayer, Kernel
from mmkv_bench.compression.session import Session

MASK_BYTES = 1 << 26  # of the mask of one block of rows


class MaskedLayer(CompressedLayer):
    """The full cache of a prefill in which a token sees the kept entries before it, and itself.

    Args:
        kept: bool `[B, Hkv, T]`.
    """

    def __init__(self, kept: Tensor):
        super().__init__(reserve=0)
        self.kept = kept

    def attention(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, None]:
        """Attend in blocks of rows, because the mask of a whole prompt would be of size T x T for every head."""
        step = max(1, MASK_BYTES // (query.shape[0] * query.shape[1] * key.shape[2]))
        outputs = []
        for start in range(0, query.shape[2], step):
            stop = min(start + step, query.shape[2])
            rows = None if mask is None else mask[..., start:stop, :stop]
            visible = self._seen(start, stop, rows).repeat_interleave(query.shape[1] // key.shape[1], 1)
            outputs.append(kernel(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], visible)[0])
        return torch.cat(outputs, 1), None

    def _seen(self, start: int, stop: int, mask: Tensor | None) -> Tensor:
        """Return the mask `[B, Hkv, stop - start, stop]` of the queries `start` to `stop - 1`: bool, or additive if `mask` is."""
        column = torch.arange(stop, device=self.device)
        row = column[start:, None]
        kept = self.kept[:, :, None, :stop].to(self.device)
        visible = (kept & (column < row)) | (column == row)
        if mask is None or mask.dtype == torch.bool:
            return visible if mask is None else visible & mask
        return mask.expand(visible.shape).masked_fill(~visible, torch.finfo(mask.dtype).min)


@torch.no_grad()
def prefill_kept_entries(
    session: Session, inputs: Mapping[str, Tensor], kept: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of the kept tokens from a second prefill, in which tokens see only kept entries and themselves.

    Args:
        session: open on the model; what it has prefilled does not change.
        inputs: the model's arguments for the whole prompt.
        kept: per layer int64 `[B, Hkv, m]`, ascending, padded on the left with -1.

    Returns:
        Per layer two tensors `[B, Hkv, m, D]`, zeros at padding.
    """
    total, layers = inputs["input_ids"].shape[1], []
    for index in kept:
        is_kept = torch.zeros(*index.shape[:2], total + 1, dtype=torch.bool, device=index.device)
        layers.append(MaskedLayer(is_kept.scatter_(2, index.masked_fill(index < 0, total), True)[..., :total]))
    cache, listener = CompressedCache.of(layers), session.listener
    session.listener = None
    try:
        session.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        session.listener = listener
    entries = []
    for layer, index in zip(layers, kept, strict=True):
        index = index.to(layer.device)
        gather_index = index.clamp_min(0).unsqueeze(-1)
        keys, values = (
            stored.gather(2, gather_index.expand(-1, -1, -1, stored.shape[-1])).masked_fill(index[..., None] < 0, 0)
            for stored in (layer.keys, layer.values)
        )
        entries.append((keys, values))
    return entries

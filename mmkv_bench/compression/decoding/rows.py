"""Several single-sequence layers, each with a policy's state of its own, decoding in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedLayer


class RowsLayer(CompressedLayer):
    """One layer of forks that all have been shown the same number of tokens.

    Each fork's layer stores its own entries and sees its own row only, exactly as when it decodes alone; what they
    return is padded on the left to the longest and masked, for the time of one attention call.

    Args:
        rows: layers of one sequence each.
    """

    def __init__(self, rows: Sequence[CompressedLayer]):
        super().__init__()
        self.rows = list(rows)
        self.seen, self.is_initialized = rows[0].seen, True
        self._entries: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append row i of `[R, Hkv, n, D]` to layer i; what attention shall see is made in `attend`."""
        self._entries = [
            row.update(key_states[i : i + 1], value_states[i : i + 1], *args, **kwargs)
            for i, row in enumerate(self.rows)
        ]
        self.seen += key_states.shape[2]
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        parts = []
        for i, (row, (own_key, own_value)) in enumerate(zip(self.rows, self._entries, strict=True)):
            own_mask = mask if mask is None or mask.shape[0] == 1 else mask[i : i + 1]
            parts.append(row.attend(query[i : i + 1], own_key, own_value, own_mask))
        self._entries = []
        slots = [part[0].shape[2] for part in parts]
        if all(part[2] is None for part in parts) and len(set(slots)) == 1:
            return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), None
        width, count = max(slots), query.shape[2]
        floating = next((part[2].dtype for part in parts if part[2] is not None), torch.bool)
        hidden = False if floating == torch.bool else torch.finfo(floating).min
        shape = (len(parts), query.shape[1], count, width)
        seen = torch.full(shape, hidden, dtype=floating, device=query.device)
        visible = torch.ones((), dtype=torch.bool) if floating == torch.bool else torch.zeros((), dtype=floating)
        keys = query.new_zeros(len(parts), parts[0][0].shape[1], width, parts[0][0].shape[3])
        values = query.new_zeros(*keys.shape[:3], parts[0][1].shape[3])
        for i, (own_key, own_value, own_mask) in enumerate(parts):
            start = width - own_key.shape[2]
            keys[i, :, start:], values[i, :, start:] = own_key[0], own_value[0]
            seen[i, :, :, start:] = visible if own_mask is None else own_mask[0]
        return keys, values, seen

    def attended(self, query: Tensor, scaling: float) -> None:
        for i, row in enumerate(self.rows):
            row.attended(query[i : i + 1], scaling)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = [self.rows[i] for i in indices.tolist()]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def entries(self) -> Tensor:
        return torch.cat([row.entries() for row in self.rows])

    def reachable(self) -> Tensor:
        return torch.cat([row.reachable() for row in self.rows])

    def nbytes(self) -> tuple[int, int]:
        data, metadata = zip(*(row.nbytes() for row in self.rows), strict=True)
        return sum(data), sum(metadata)

    def host_nbytes(self) -> int:
        return sum(row.host_nbytes() for row in self.rows)

"""A reducer that drops the entries that are not selected."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.numerics.ordering import at_slots
from mmkv_bench.compression.reducers.base import Reducer


@dataclass(frozen=True)
class Evict(Reducer):
    """A reducer that gathers the selected entries unchanged: keys keep their rotation. No parameters."""

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        slots = index.clamp_min(0)
        kept_key, kept_value = at_slots(key, slots), at_slots(value, slots)
        padding = (index < 0).unsqueeze(-1)
        if bool(padding.any()):
            kept_key.masked_fill_(padding, 0)
            kept_value.masked_fill_(padding, 0)
        return kept_key, kept_value

"""The least time of a decode step beside the times of a table of costs: what its bytes take at the device's bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mmkv_bench.tables.cost_names import KNOWN, Cost

TIMED = "tpot_s"
LIMIT = "limit"
"""Header of the column of limits."""
USEFUL = "bytes_useful_step"
"""What a step reads of keys and values, from which its limit is computed."""


class Limit(Protocol):
    """Of a model on a device: bandwidth of a read-only pass [bytes/s], the device's name, and the least seconds of a step whose
    sequences, `batch` of them, read `useful` bytes of keys and values together."""

    @property
    def bandwidth(self) -> float: ...

    @property
    def device(self) -> str: ...

    def step_s(self, useful: float, batch: int) -> float: ...


Known = Callable[[Mapping[str, str]], "Limit | None"]
"""Of a table's context; None where the device was not measured, or the model's shape is not known."""


@dataclass(frozen=True)
class StepLimits:
    """Of the lines of a table: (label, budget) -> the least seconds of a step; and at what bandwidth, of which device."""

    least: Mapping[tuple[str, str], float]
    bandwidth: float
    device: str


def needed(costs: Sequence[Cost]) -> list[Cost]:
    """What limits are computed from and is not among the costs, where a step's time is."""
    keys = {cost.key for cost in costs}
    return [KNOWN[USEFUL]] if TIMED in keys and USEFUL not in keys else []

"""A line of a table: which method, and what its stored parameters say of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmkv_bench.tables.calibrated import artefacts


@dataclass(frozen=True)
class Line:
    """One line of a table. `budgeted` is False for `full` and whatever else takes no budget."""

    label: str
    name: str
    base: str
    tuned: bool
    reading: str | None
    parameters: str
    budgeted: bool

    @property
    def cheats(self) -> bool:
        """It was given the full cache's own answer: a ceiling, which neither is marked best nor competes."""
        return bool(self._told.get("reads_answer"))

    @cached_property
    def calibrated(self) -> bool:
        """It was built with a calibration: numbers measured on data before the first prompt."""
        return bool(artefacts(self.parameters))

    @property
    def may_exceed(self) -> bool:
        """More entries than the budget are no defect: a released code's, or the paper's own formula."""
        return self.reading == "released" or bool(self._told.get("over_budget"))

    @property
    def renamed(self) -> bool:
        """It is another method as that one's file has it: a variant that changes nothing but the name."""
        return self.name != self.base and not self.tuned and self.base not in ("custom", "kvpress")

    @property
    def resamples(self) -> bool:
        """It evicts nothing and shows smaller pictures: the control whose entries follow from sizes of pictures."""
        return self.base == "pixels"

    @cached_property
    def _told(self) -> dict[str, Any]:
        return json.loads(self.parameters)

    @property
    def variant(self) -> tuple[str, str, str | None, str]:
        """What tells it from every other line, whatever its label says."""
        return self.name, self.base, self.reading, self.parameters

"""Calibrations for who asks for sizes and wants no answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.artefact import Calibrations
from mmkv_bench.errors import CalibrationError

if TYPE_CHECKING:
    from mmkv_bench.families.facts import ModelFacts


@dataclass
class StandIns:
    """A model's calibrations where they are here, else made-up ones of the right shape, which treat layers and heads alike.

    Attributes:
        model, fingerprint: whose; family: its shape; used: methods that got made-up ones.
    """

    model: str
    fingerprint: str
    family: ModelFacts
    used: set[str] = field(default_factory=set)
    seen: dict[str, Any] = field(default_factory=dict)

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        """Return data as `Calibrations.data` does.

        Raises:
            CalibrationError: none is here, and none can be made up.
        """
        try:
            return Calibrations(self.model, self.fingerprint).data(method, spec)
        except CalibrationError as error:
            layers, heads = self.family.num_layers, self.family.num_query_heads
            shares = [step / 100 for step in range(1, 101)]
            made: dict[str, dict[str, Any]] = {
                "prefixkv": {"grid": shares, "ratios": [[share] * layers for share in shares]},
                "sparsemm": {"scores": [[1.0] * heads] * layers, "kv_heads": self.family.num_kv_heads},
                "hybridkv": {"theta": 0.5},
            }
            if method not in made:
                raise CalibrationError(f"{method} needs a calibration of {self.model}: {error}") from error
            self.used.add(method)
            return made[method]

    def taken(self) -> dict[str, str]:
        """No artefact was used."""
        return {}

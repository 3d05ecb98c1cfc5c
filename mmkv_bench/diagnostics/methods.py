"""The methods of a run, for analyses that compare what they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.calibrate.artefact import Calibrations
from mmkv_bench.compression.budget import Budget
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.diagnostics.measuring import Kept
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.node import parameters_json
from mmkv_bench.plan.cells import bases, build_methods

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig


def methods_of(config: RunConfig, fingerprint: str) -> list[Kept]:
    """Every method that evicts at every budget, under the first seed; `full` is there without being asked for.

    Args:
        config: of a run; fingerprint: of its model, whose calibrations are looked up.

    Raises:
        ConfigError: a method that cannot be built, or one of them that knows the answer beforehand.
    """
    defaults = method_defaults(bases(config), config.folders)
    found = []
    for method in build_methods(config, defaults, Calibrations(config.model.name, fingerprint)):
        if method.compressor.needs.answer:
            raise ConfigError(
                f"{method.name} reads the answer beforehand, so that what it keeps is not decided by a prompt"
            )
        for value in [] if method.compressor.unbudgeted else dict.fromkeys(config.budget):
            budget = Budget.parse(value)
            label = f"{method.name}@{budget}" + ("" if method.compressor.reading == "paper" else " released")
            plain = method.plain
            found.append(
                Kept(label, str(plain["base"]), method.compressor, budget, parameters_json(plain, method.decoding))
            )
    return found

"""The plan of a run: what a configuration comes to before a model is loaded.

Everything that runs, counts or shows a configuration starts from here: `run`, `launch`, `score`, `plan`, the public API.
A command makes one plan and hands it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.schema import EFFICIENCY, RunConfig
from mmkv_bench.errors import CalibrationError, ConfigError
from mmkv_bench.families.facts import ModelFacts, model_facts
from mmkv_bench.models.quiet import quiet_libraries
from mmkv_bench.models.source import Source
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, bases, expand, uncalibrated
from mmkv_bench.plan.coverage import COLUMNS, Standing
from mmkv_bench.plan.parts import Part, outlined_parts, parts_of
from mmkv_bench.plan.sample_filter import reaching
from mmkv_bench.plan.tasks import labelled, stay_offline, tasks_of
from mmkv_bench.plan.validate import validate_combinations
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.compression.compressor import Compressor


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        config: the configuration, its datasets under their labels.
        cells: all of them, by dataset; parts: what each dataset has to do in this process, in the configuration's order.
        notes: sentences for the card: cells that are the same, what an outline could not look at.
        family: what is known of the model, None where an outline knows nothing.
        uncalibrated: of an outline, a sentence for each method that lacks its calibration.
    """

    config: RunConfig
    cells: Sequence[Cell]
    parts: Sequence[Part]
    notes: Sequence[str]
    family: ModelFacts | None
    uncalibrated: Sequence[str] = ()

    @property
    def out(self) -> Path:
        """The folder of its rows."""
        return Path(self.config.out).expanduser()

    @property
    def names(self) -> list[str]:
        """The cells' hashes."""
        return [cell.cell for cell in self.cells]

    @property
    def samples(self) -> dict[str, int]:
        """Dataset -> samples of this run, limit and shard applied."""
        return {part.dataset: len(part.samples) for part in self.parts}

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Columns of the cells' rows that say under what they are made: asked for by who makes rows, since it looks for
        the device. Raises what `check_device` raises."""
        return identities.provenance(self.config, self.cells[0].dtype)

    def check_device(self) -> None:
        """Raises ConfigError for a device that is not there."""
        identities.usable_device(self.config.model, self.cells[0].dtype)

    def standing(self, store: Store, rows: pa.Table | None = None) -> Standing:
        """What a store holds of it; rows that `retry` asks for again do not count.

        rows: those of its cells, where they were read already (see `Standing`).
        """
        held = store.responses(self.names, COLUMNS, coded=True) if rows is None else rows.select(COLUMNS)
        return Standing(held, list(self.config.retry))

    def unanswered(self, store: Store) -> int:
        """How many samples some cell has no row for: 0 when every process of a split run did its part."""
        standing = Standing(store.responses(self.names, COLUMNS, coded=True))
        return sum(standing.missing(part) for part in self.parts)

    def at_stage(self, stage: str) -> Plan:
        """The same for another `stage`."""
        return replace(self, config=self.config.updated(stage=stage))

    def with_changed(self, changed: Mapping[str, Collection[str]]) -> Plan:
        """The same, with the stored answers (cell -> ids of samples) that `retry=[changed]` is to make again."""
        return replace(self, parts=[replace(part, changed=changed) for part in self.parts])


def make_plan(config: RunConfig) -> Plan:
    """The plan of a validated configuration. Of the model its files are read, not its weights into memory; data are
    opened where their content is not known otherwise. No page is drawn.

    Raises:
        MMKVError: a model or data that cannot be had, methods or protocols that do not go with them.
    """
    from mmkv_bench.datasets.sources import preflight

    _refuse_efficiency(config)
    specs = tasks_of(config)
    stay_offline(config, specs)
    for spec in specs.values():
        preflight(spec)
    quiet_libraries()
    config = reaching(config, specs)
    asked, config = config, labelled(config, specs)
    identity = identities.gather(config, specs)
    cells, notes = expand(config, identity, _defaults(config))
    family = model_facts(Source.of(config.model).described())
    validate_combinations(config, family, _compressors(cells))
    return Plan(config, cells, parts_of(asked, specs, cells), notes, family)


def outline(config: RunConfig) -> Plan:
    """The plan of a validated configuration as far as it is known without a connection and without opening data.

    Cells of what is unknown (`identity.UNKNOWN`) are those of no run; their number and labels are right.

    Raises:
        MMKVError: methods or protocols that do not go with the model, files that are not a model's.
    """
    _refuse_efficiency(config)
    specs = tasks_of(config)
    stay_offline(config, specs)
    asked, config = config, labelled(config, specs)
    identity = identities.outline(config, specs, Store(Path(config.out).expanduser()).cells())
    defaults, missing = _defaults(config), list[str]()
    try:
        cells, notes = expand(config, identity, defaults)
    except CalibrationError:
        missing = uncalibrated(config, identity, defaults)
        cells, notes = expand(config, identity, defaults, calibrated=False)
    lacking = list(missing)
    described = Source.of(config.model).outlined()[0]
    family = None if described is None else model_facts(described)
    if family is None:
        missing.append(f"the files of model {config.model.name} are not here: what it can run is checked by the run")
    else:
        validate_combinations(config, family, _compressors(cells))
    parts, unseen = outlined_parts(asked, specs, cells)
    return Plan(config, cells, parts, [*notes, *missing, *unseen], family, lacking)


def _refuse_efficiency(config: RunConfig) -> None:
    if config.scenario == EFFICIENCY:
        raise ConfigError(
            "scenario=efficiency times one cell at a time in one process and answers no dataset; start it with mmkv-bench run, "
            "or foresee it with mmkv-bench plan"
        )


def _defaults(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    return method_defaults(bases(config), tuple(config.folders))


def _compressors(cells: Sequence[Cell]) -> list[Compressor]:
    """Those of the cells, each once."""
    return list({(cell.method, cell.reading): cell.compressor for cell in cells}.values())

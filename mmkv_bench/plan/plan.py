"""The plan of a run: facts derived from a configuration before a model is loaded, and which of its rows are stored.

Commands make one plan (`planner.py`) and pass it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from mmkv_bench import devices
from mmkv_bench.config.schema import CHANGED, AnswerConfig, Judge, Logger, Model, RunConfig
from mmkv_bench.devices.requirements import COMPILED, check_compiler
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.models.source import Source
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, MethodEntry
from mmkv_bench.store.parts import places
from mmkv_bench.store.response import STATUSES

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.store.store import Store

COLUMNS = ("cell", "sample_id", "status", "measured")


@dataclass(frozen=True)
class DatasetShare:
    """One dataset of a plan: task, cells, and ids of the samples within limit and shard, in order.

    Attributes:
        name: name in the configuration.
        dataset: label in rows and tables.
        about: `about` of the dataset's file.
        changed: cell -> ids of samples that `retry=[changed]` answers again.
        counted: source of the samples: `data`, `documented` (their number is from the dataset's file), or `unknown` (no
            samples).
    """

    name: str
    dataset: str
    spec: TaskSpec
    cells: Sequence[Cell]
    samples: Sequence[str]
    about: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Collection[str]] = field(default_factory=dict)
    counted: str = "data"


class Coverage:
    """Which answers of a plan are stored.

    Args:
        rows: rows of the table `responses`, with at least `COLUMNS`.
        retry: statuses whose rows count as missing (`retry` of a run).
    """

    def __init__(self, rows: pa.Table, retry: Collection[str] = ()) -> None:
        self.rows, self.retry = rows, tuple(retry)

    def statuses(self, part: DatasetShare) -> np.ndarray:
        """Return statuses, int8 [cells, samples]: an index of `STATUSES`, or -1 without a row."""
        cells = [cell.cell for cell in part.cells]
        statuses = np.full([len(cells), len(part.samples)], -1, np.int8)
        cell, sample, status = (
            places(self.rows[column], pa.array(values, pa.string()))
            for column, values in (("cell", cells), ("sample_id", part.samples), ("status", STATUSES))
        )
        is_known = (cell >= 0) & (sample >= 0)
        statuses[cell[is_known], sample[is_known]] = status[is_known]
        return statuses

    def answered(self, part: DatasetShare) -> np.ndarray:
        """Return which rows are stored and not to be repeated by `retry`, bool [cells, samples]."""
        statuses = self.statuses(part)
        is_answered = statuses >= 0
        for status in self.retry:
            if status != CHANGED:
                is_answered &= statuses != STATUSES.index(status)
        if CHANGED in self.retry:
            for row, cell in enumerate(part.cells):
                samples_to_repeat = part.changed.get(cell.cell, ())
                is_answered[row] &= [sample not in samples_to_repeat for sample in part.samples]
        return is_answered

    def done(self, part: DatasetShare) -> dict[str, set[str]]:
        """Map each cell to the ids of its samples in `answered`."""
        samples = np.array(part.samples, object)
        return {cell.cell: set(samples[row]) for cell, row in zip(part.cells, self.answered(part), strict=True)}

    def count(self, part: DatasetShare) -> int:
        """Return the number of rows in `answered`."""
        return int(self.answered(part).sum())

    def missing(self, part: DatasetShare) -> int:
        """Return the number of samples that lack an answer in at least one cell."""
        return int((~self.answered(part)).any(0).sum())

    def left(self, part: DatasetShare) -> int:
        """Return the number of missing answers, one per cell and sample."""
        return int((~self.answered(part)).sum())

    def ok(self, cells: Collection[str]) -> dict[str, int]:
        """Map each of these cells to its number of answers with status ok. Cells with none are left out."""
        cell_names = sorted(cells)
        cell_of_row = places(self.rows["cell"], pa.array(cell_names, pa.string()))
        is_ok = places(self.rows["status"], pa.array(STATUSES[:1], pa.string())) == 0
        ok_rows_per_cell = np.bincount(cell_of_row[is_ok & (cell_of_row >= 0)], minlength=len(cell_names))
        return {name: int(count) for name, count in zip(cell_names, ok_rows_per_cell, strict=True) if count}

    def failed(self, part: DatasetShare) -> int:
        """Return the number of failed rows."""
        return int((self.statuses(part) > 0).sum())


@dataclass(frozen=True)
class Plan:
    """What is known about a run before its model is loaded: settings, cells, and datasets with their samples.

    Attributes:
        out: folder of the run's rows.
        stage: `generate`, `score` or `both`.
        answering: settings for answering samples.
        judge, logger, primary, json: settings of the configuration.
        retry: statuses of stored rows that count as missing.
        resolved: the configuration for rows and trackers, with datasets under their labels.
        entries: the methods, not built.
        cells: all cells (one model, dataset, method, budget, protocol, reading and seed each), sorted by dataset.
        parts: the datasets, with their cells and the samples that this process answers.
        notes: sentences to print.
        family: facts about the model; None if an outline could not read its files.
        uncalibrated: for an outline, a sentence per method that lacks its calibration.
    """

    out: Path
    stage: str
    answering: AnswerConfig
    judge: Judge
    logger: Logger
    retry: Sequence[str]
    primary: str | None
    json: bool
    resolved: Mapping[str, Any]
    entries: Sequence[MethodEntry]
    cells: Sequence[Cell]
    parts: Sequence[DatasetShare]
    notes: Sequence[str]
    family: ModelFacts | None
    uncalibrated: Sequence[str] = ()

    @classmethod
    def of(cls, config: RunConfig, entries: Sequence[MethodEntry], cells: Sequence[Cell], **facts: Any) -> Self:
        """Return the plan of a configuration. facts: the plan's fields that come from neither `config` nor the other
        arguments."""
        return cls(
            out=Path(config.out).expanduser(),
            stage=config.stage,
            answering=config.answering,
            judge=config.judge,
            logger=config.logger,
            retry=config.retry,
            primary=config.primary,
            json=config.json,
            resolved=config.resolved,
            entries=entries,
            cells=cells,
            **facts,
        )

    @property
    def model(self) -> Model:
        """Settings of the model."""
        return self.answering.model

    @property
    def limit(self) -> int | None:
        """Largest number of samples per dataset; None: all."""
        return self.answering.selection.limit

    @property
    def batch_prefill(self) -> str:
        """How the prompts of a batch are prefilled: one by one, or together."""
        return str(self.resolved["batch_prefill"])

    @property
    def names(self) -> list[str]:
        """Hashes of the cells."""
        return [cell.cell for cell in self.cells]

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Columns about code, versions and device. Computed when needed, because this looks for the device. Raises the
        errors of `check_device`."""
        return identities.provenance(self.model, self.cells[0].dtype)

    def check_device(self) -> None:
        """Raise ConfigError if the configured device does not exist on this machine."""
        identities.usable_device(self.model, self.cells[0].dtype)

    def check_machine(self) -> None:
        """Raise ConfigError or UnsupportedError without the device, compiler or attention kernel of the plan."""
        from mmkv_bench.compression.flash import check  # torch

        self.check_device()
        if is_compiled := self.answering.decode == COMPILED:
            check_compiler()
        check(self.model.attention, devices.kind_of(self.model.device), self.cells[0].dtype, is_compiled)

    def load(self) -> LoadedModel:
        """Load the plan's model. Raises the errors of `Source.load`, and of `Source.confirm` if files changed since
        planning."""
        source = Source.of(self.model)
        loaded = source.load()
        source.confirm(self.cells[0].model_fingerprint)
        return loaded

    def coverage(self, store: Store, rows: pa.Table | None = None) -> Coverage:
        """Return which rows of the plan a store has. rows: stored rows of the plan's cells, if read already."""
        plan_rows = store.responses(self.names, COLUMNS, coded=True) if rows is None else rows.select(COLUMNS)
        return Coverage(plan_rows, self.retry)

    def unanswered(self, store: Store) -> int:
        """Return the number of samples that lack a row in some cell, whatever `retry` says."""
        coverage = Coverage(store.responses(self.names, COLUMNS, coded=True))
        return sum(coverage.missing(part) for part in self.parts)

    def at_stage(self, stage: str) -> Plan:
        """Return a copy of the plan with another `stage`."""
        return replace(self, stage=stage, resolved={**self.resolved, "stage": stage})

    def with_changed(self, changed: Mapping[str, Collection[str]]) -> Plan:
        """Return a copy of the plan that answers some samples again. changed: cell -> ids of samples."""
        return replace(self, parts=[replace(part, changed=changed) for part in self.parts])

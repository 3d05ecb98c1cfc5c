"""The plan of a run: typed facts that a configuration comes to before a model is loaded, and its coverage by a store.

Everything that runs, counts or shows a configuration starts from here: `run`, `launch`, `score`, `plan`, the public API.
A command makes one plan (`planner.py`) and hands it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from mmkv_bench.config.schema import CHANGED, AnswerConfig, Judge, Logger, Model, RunConfig
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, MethodEntry
from mmkv_bench.store.parts import places
from mmkv_bench.store.response import STATUSES

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.store.store import Store

COLUMNS = ("cell", "sample_id", "status", "measured")


@dataclass(frozen=True)
class DatasetShare:
    """One dataset's share: its task, its cells, and the ids of the samples of this limit and shard, in order.

    Attributes:
        name: the dataset as the configuration names it; dataset: its label in rows and tables.
        about: what the dataset's file says of it; changed: cell -> ids of samples whose rows `retry=[changed]` makes again.
        counted: how the samples are known: `data`, `documented` (the dataset's own number of samples, before its data
            were looked at), or `unknown` (there are none here then).
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
    """The rows that there are of some cells.

    Args:
        rows: of the table `responses`, `COLUMNS` among their columns; retry: what does not count as done (`retry` of a run).
    """

    def __init__(self, rows: pa.Table, retry: Collection[str] = ()) -> None:
        self.rows, self.retry = rows, tuple(retry)

    def statuses(self, part: DatasetShare) -> np.ndarray:
        """int8 [cells, samples] of a part, in its order: -1 without a row, else the status's place in `STATUSES`."""
        cells, samples = [cell.cell for cell in part.cells], list(part.samples)
        found = np.full([len(cells), len(samples)], -1, np.int8)
        cell, sample, status = (
            places(self.rows[column], pa.array(values, pa.string()))
            for column, values in (("cell", cells), ("sample_id", samples), ("status", STATUSES))
        )
        own = (cell >= 0) & (sample >= 0)
        found[cell[own], sample[own]] = status[own]
        return found

    def answered(self, part: DatasetShare) -> np.ndarray:
        """bool [cells, samples]: there is a row, and `retry` does not ask for it again."""
        statuses = self.statuses(part)
        answered = statuses >= 0
        for status in self.retry:
            if status != CHANGED:
                answered &= statuses != STATUSES.index(status)
        if CHANGED in self.retry:
            for row, cell in enumerate(part.cells):
                again = part.changed.get(cell.cell, ())
                answered[row] &= [sample not in again for sample in part.samples]
        return answered

    def done(self, part: DatasetShare) -> dict[str, set[str]]:
        """Cell -> ids of the part's samples that are answered."""
        samples = np.array(part.samples, object)
        return {cell.cell: set(samples[row]) for cell, row in zip(part.cells, self.answered(part), strict=True)}

    def count(self, part: DatasetShare) -> int:
        """Number of the part's rows that are there."""
        return int(self.answered(part).sum())

    def missing(self, part: DatasetShare) -> int:
        """Number of samples that lack a row in some cell."""
        return int((~self.answered(part)).any(0).sum())

    def left(self, part: DatasetShare) -> int:
        """Number of missing rows."""
        return int((~self.answered(part)).sum())

    def ok(self, cells: Collection[str]) -> dict[str, int]:
        """Cell -> how many answers it has, of those of these cells that have one."""
        names = sorted(cells)
        of_cell = places(self.rows["cell"], pa.array(names, pa.string()))
        ok = places(self.rows["status"], pa.array(STATUSES[:1], pa.string())) == 0
        counts = np.bincount(of_cell[ok & (of_cell >= 0)], minlength=len(names))
        return {name: int(count) for name, count in zip(names, counts, strict=True) if count}

    def failed(self, part: DatasetShare) -> int:
        """Number of the part's rows that are failures, whichever run made them."""
        return int((self.statuses(part) > 0).sum())


@dataclass(frozen=True)
class Plan:
    """Typed facts about a run.

    Attributes:
        out: folder of its rows; stage: `generate`, `score` or `both`; answering: how samples are answered.
        judge, logger, primary, json: of the configuration; retry: statuses of stored rows that do not count as done.
        resolved: the configuration as rows and trackers hold it, its datasets under their labels.
        entries: its methods; cells: all of them, by dataset; parts: what each dataset has to do in this process.
        notes: sentences for the card: cells that are the same, what an outline could not look at.
        family: what is known of the model, None where an outline knows nothing.
        uncalibrated: of an outline, a sentence for each method that lacks its calibration.
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
        """The plan of a configuration whose cells are known."""
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
        """Settings of its model."""
        return self.answering.model

    @property
    def limit(self) -> int | None:
        """Number of samples of a dataset that are read; None: all."""
        return self.answering.selection.limit

    @property
    def batch_prefill(self) -> str:
        """Prefill of a batch: one by one, or together."""
        return str(self.resolved["batch_prefill"])

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
        return identities.provenance(self.model, self.cells[0].dtype)

    def check_device(self) -> None:
        """Raises ConfigError for a device that is not there."""
        identities.usable_device(self.model, self.cells[0].dtype)

    def coverage(self, store: Store, rows: pa.Table | None = None) -> Coverage:
        """Coverage of the plan by a store; rows that `retry` asks for again do not count.

        rows: those of its cells, where they were read already (see `Coverage`).
        """
        held = store.responses(self.names, COLUMNS, coded=True) if rows is None else rows.select(COLUMNS)
        return Coverage(held, self.retry)

    def unanswered(self, store: Store) -> int:
        """Number of samples that lack a row in some cell: 0 when every process of a split run did its part."""
        coverage = Coverage(store.responses(self.names, COLUMNS, coded=True))
        return sum(coverage.missing(part) for part in self.parts)

    def at_stage(self, stage: str) -> Plan:
        """The same for another `stage`."""
        return replace(self, stage=stage, resolved={**self.resolved, "stage": stage})

    def with_changed(self, changed: Mapping[str, Collection[str]]) -> Plan:
        """The same, with the stored answers (cell -> ids of samples) that `retry=[changed]` is to make again."""
        return replace(self, parts=[replace(part, changed=changed) for part in self.parts])

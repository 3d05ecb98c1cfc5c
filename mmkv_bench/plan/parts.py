"""Parts of a run: what one dataset has to do in this process, and how much of it is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmkv_bench.config.schema import CHANGED

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.datasets.task_spec import TaskSpec
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


@dataclass(frozen=True)
class Part:
    """One dataset's share: its task, its cells, and the ids of the samples of this limit and shard, in order.

    `changed`: cell -> ids of samples whose rows `retry=[changed]` makes again.
    """

    dataset: str
    spec: TaskSpec
    cells: Sequence[Cell]
    samples: Sequence[str]
    changed: Mapping[str, Collection[str]] = field(default_factory=dict)

    def done(self, store: Store, retry: Collection[str] = ()) -> dict[str, set[str]]:
        """Cell -> ids of samples that have a row; rows that `retry` names do not count."""
        done = store.done([cell.cell for cell in self.cells], [status for status in retry if status != CHANGED])
        if CHANGED in retry:
            done = {cell: samples.difference(self.changed.get(cell, ())) for cell, samples in done.items()}
        return done

    def rows(self, store: Store, retry: Collection[str] = ()) -> int:
        """How many of the part's rows there are."""
        have = self.done(store, retry).values()
        return sum(sample in ids for ids in have for sample in self.samples)

    def missing(self, store: Store, retry: Collection[str] = ()) -> int:
        """How many samples some cell has no row for."""
        have = self.done(store, retry).values()
        return sum(any(sample not in ids for ids in have) for sample in self.samples)


def parts_of(config: DictConfig, specs: Mapping[str, TaskSpec], cells: Sequence[Cell]) -> list[Part]:
    """The parts of a run, in the order of its datasets. Their data are made or opened.

    Args:
        specs: dataset label -> task; cells: of all datasets.
    """
    from mmkv_bench.evaluation import sample_refs
    from mmkv_bench.plan.shards import in_shard

    return [
        Part(
            label,
            spec,
            [cell for cell in cells if cell.dataset == label],
            [ref.sample_id for ref in sample_refs(spec, config.limit) if in_shard(ref.cluster, config.shard)],
        )
        for label, spec in specs.items()
    ]


def failures(store: Store, parts: Sequence[Part]) -> int:
    """How many rows of these parts are failures, whichever run made them."""
    failed = 0
    for part in parts:
        rows = store.responses([cell.cell for cell in part.cells], ("sample_id", "status"))
        wanted = set(part.samples)
        ends = zip(rows["sample_id"].to_pylist(), rows["status"].to_pylist(), strict=True)
        failed += sum(status != "ok" and sample in wanted for sample, status in ends)
    return failed

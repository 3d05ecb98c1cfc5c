"""Parts of a run: what one dataset has to do in this process."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import MMKVError
from mmkv_bench.plan.sample_filter import chosen

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.datasets.task_spec import TaskSpec
    from mmkv_bench.plan.cells import Cell


@dataclass(frozen=True)
class Part:
    """One dataset's share: its task, its cells, and the ids of the samples of this limit and shard, in order.

    Attributes:
        name: the dataset as the configuration names it; dataset: its label in rows and tables.
        changed: cell -> ids of samples whose rows `retry=[changed]` makes again.
        counted: how the samples are known: `data`, `documented` (the dataset's own number of samples, before its data
            were looked at), or `unknown` (there are none here then).
    """

    name: str
    dataset: str
    spec: TaskSpec
    cells: Sequence[Cell]
    samples: Sequence[str]
    changed: Mapping[str, Collection[str]] = field(default_factory=dict)
    counted: str = "data"


def parts_of(config: RunConfig, specs: Mapping[str, TaskSpec], cells: Sequence[Cell]) -> list[Part]:
    """The parts of a run, in the order of its datasets. Data that are not pages are opened.

    Args:
        specs: dataset label -> task; cells: of all datasets.
    """
    return [_part(config, str(name), spec, cells) for name, spec in zip(config.datasets, specs.values(), strict=True)]


def _part(config: RunConfig, name: str, spec: TaskSpec, cells: Sequence[Cell]) -> Part:
    from mmkv_bench.evaluation.documents import sample_refs
    from mmkv_bench.plan.shards import in_shard

    refs = chosen(sample_refs(spec, config.limit), config)
    samples = [ref.sample_id for ref in refs if in_shard(ref.cluster, config.shard)]
    return Part(name, spec.dataset, spec, _own(spec, cells), samples)


def _own(spec: TaskSpec, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.dataset == spec.dataset]


def outlined_parts(
    config: RunConfig, specs: Mapping[str, TaskSpec], cells: Sequence[Cell]
) -> tuple[list[Part], list[str]]:
    """`parts_of` without opening data, and notes about what is not known then.

    Pages are known as they are; of other datasets the number of samples is counted in the footers of local parquet files,
    or is what the dataset's file says (`about.samples`), and a shard is not told from the whole.
    """
    from mmkv_bench.datasets.specs import limited

    parts, notes = [], []
    for name, node, (label, spec) in zip(config.datasets, config.datasets.values(), specs.items(), strict=True):
        if spec.is_pages:
            parts.append(_part(config, str(name), spec, cells))
            continue
        total, counted, why = _amount(spec, (node.get("about") or {}).get("samples"))
        notes += [why] if why else []
        if str(config.shard) != "0/1" and total:
            notes.append(f"which samples of {label} are of shard {config.shard} its data tell: all are counted here")
        count = 0 if total is None else min(total, limited(spec, config.limit) or total)
        samples = [spec.sample_id(number) for number in range(count)]
        samples = samples if config.samples is None else [one for one in samples if one in config.samples]
        parts.append(Part(str(name), label, spec, _own(spec, cells), samples, counted=counted))
    return parts, notes


def _amount(spec: TaskSpec, stated: Any) -> tuple[int | None, str, str | None]:
    """Samples of a dataset, how they are known (see `Part.counted`), and what to say of it."""
    from mmkv_bench.datasets.sources import local_rows

    try:
        rows = local_rows(spec)
    except MMKVError as error:
        return None, "unknown", str(error)
    if rows is not None:
        return rows, "data", None
    found = None if spec.fixture else re.match(r"\d+", str(stated or ""))
    if found is None:
        return None, "unknown", f"how many samples {spec.dataset} has is known only from its data"
    return int(found[0]), "documented", None

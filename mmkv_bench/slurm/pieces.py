"""The jobs that a sweep still has to do. A job belongs to one run and shard, and to one dataset or several short ones. All
methods, budgets and seeds of the run are answered in the same job, from shared prefills."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.config.schema import EFFICIENCY
from mmkv_bench.errors import ConfigError
from mmkv_bench.evaluation.documents import sample_refs
from mmkv_bench.forecast.throughput import rates
from mmkv_bench.plan.selection import index_of
from mmkv_bench.plan.stale_answers import changed_answers

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import DatasetShare, Plan
    from mmkv_bench.store.store import Store

_OURS = ("launcher", "shards", "dry", "json", "only", "shard", "stage")
"""Keys that a sweep reads or sets itself."""


@dataclass(frozen=True)
class SweepJob:
    """One job: the overrides of its run, its model, its datasets and its shard."""

    overrides: tuple[str, ...]
    model: str
    datasets: tuple[str, ...]
    shard: str

    @property
    def subjects(self) -> list[str]:
        """Return names of what the job works on. Two jobs that may work on the same samples share such a subject."""
        return [f"{self.model} {dataset}" for dataset in self.datasets]

    def __str__(self) -> str:
        return f"{self.model} {', '.join(self.datasets)}" + ("" if self.shard == "0/1" else f" shard {self.shard}")


def check(scenario: str, stage: str, shard: str) -> None:
    """Refuse settings that a sweep on Slurm cannot split: scenario=efficiency, stage=score, or a given shard."""
    if scenario == EFFICIENCY:
        raise ConfigError(
            "scenario=efficiency times its cells one after another in one process; allowed with launcher=slurm: "
            "scenario=quality; run it with mmkv-bench run inside a job"
        )
    if stage == "score":
        raise ConfigError(
            "stage=score needs only one process; allowed with launcher=slurm: both, generate; use "
            "mmkv-bench run for stage=score"
        )
    if shard != "0/1":
        raise ConfigError(f"shard={shard}: a sweep makes the shards itself; give shards=<number>")


def pieces(
    job: Sequence[str], plan: Plan, store: Store, count: int, job_hours: float, opened: bool = True
) -> list[SweepJob]:
    """Return the jobs that one run of a sweep still needs. A job is needed if a sample lacks a row in some cell.

    Datasets that only lack scores get no job. Only the stored rows decide. So a sweep may be continued with any number of shards,
    and ends with the same rows.

    Args:
        job: the run's overrides.
        plan: the run's plan.
        store: the store of the run's rows.
        count: number of shards of each dataset.
        job_hours: maximum hours of a job with several datasets.
        opened: whether data may be opened. If not, answers to changed prompts count as done, and every shard gets a job.
    """
    if opened:
        plan = plan.with_changed(changed_answers(plan, store)[0])
    coverage, ours = plan.coverage(store), ("slurm.", "hydra.launcher.", "hydra.sweep.", "hydra/")
    keys = [(text.partition("=")[0].lstrip("+~"), text) for text in job]
    own = [text for key, text in keys if key not in _OURS and not key.startswith(ours)]
    # Scores are for whole datasets. If jobs have only parts of a dataset, the sweep itself scores at its end.
    stage = "generate" if count > 1 else plan.stage
    asked_for: list[tuple[DatasetShare, int]] = []
    for part in plan.parts:
        wanting = {part.samples[place] for place in np.flatnonzero(~coverage.answered(part).all(0)).tolist()}
        asked_for += [(part, index) for index in sorted(_shards(part, wanting, plan, count, opened))]
    hours: dict[str, float] = {}  # of one shard of each dataset, at the rate of stored rows, where there is one
    if len(plan.parts) > 1 and job_hours:
        known = {rate.dataset: rate.hours for rate in rates(plan, coverage, store)}
        hours = {dataset: whole / count for dataset, whole in known.items() if whole is not None}
    made = []
    for index, parts in _together(asked_for, hours, job_hours):
        names, shard = [part.name for part in parts], f"{index}/{count}"
        only = names[0] if len(names) == 1 else f"[{','.join(names)}]"
        mine = (f"only={only}", f"shard={shard}", f"stage={stage}", "shards=1", "dry=false")
        made.append(SweepJob((*own, *mine), plan.model.name, tuple(part.dataset for part in parts), shard))
    return made


def _together(
    asked_for: Sequence[tuple[DatasetShare, int]], hours: Mapping[str, float], most: float
) -> list[tuple[int, list[DatasetShare]]]:
    """Group datasets of the same shard into jobs of at most `most` hours, in order. A dataset with unknown hours gets a
    separate job."""
    jobs: list[tuple[int, list[DatasetShare]]] = []
    filling: dict[int, tuple[list[DatasetShare], float]] = {}
    for part, index in asked_for:
        own = hours.get(part.dataset, math.inf)
        parts, filled = filling.get(index, ([], math.inf))
        total = filled + own
        if total <= most:
            parts.append(part)
        else:
            parts, total = [part], own
            jobs.append((index, parts))
        filling[index] = parts, total
    return jobs


def _shards(part: DatasetShare, wanting: set[str], plan: Plan, count: int, opened: bool) -> set[int]:
    """Return the shards that contain one of the samples `wanting`. If that is unknown without opening the data, return all
    shards.
    """
    opened = part.spec.is_pages or (opened and part.counted == "data")
    if not wanting or count == 1 or not opened:
        return set(range(count)) if wanting else set()
    refs = sample_refs(part.spec, plan.limit)
    return {index_of(ref.cluster, count) for ref in refs if ref.sample_id in wanting}

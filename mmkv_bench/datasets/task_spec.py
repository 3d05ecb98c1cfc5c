"""One dataset of a run, as everything after its configuration knows it. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmkv_bench.datasets.page_tasks import PAGE_TASKS, page_task


@dataclass(frozen=True)
class TaskSpec:
    """One dataset of a run. Made by `specs.spec_from_config` from `conf/dataset/<name>.yaml`.

    name          lmms-eval task, for example `pages_walk_small` or `docvqa_val`
    dataset       our name of it, as rows and tables show it; for pages it tells size and split
    size          `small` or `large` for pages, None for any other task
    split         split of the data; None takes the one the task's YAML names
    count         samples the dataset has (pages), None = as many as it holds
    generation    generation settings of the config; they win over the task's YAML (see `generation_settings`)
    metrics       per-sample metrics whose mean over samples is this dataset's headline, () = whatever the task gives
    offline       no connection to a hub is tried
    dataset_path  a local folder (parquet files or save_to_disk) that replaces the data source of the task's YAML
    include_path  a folder with tasks of one's own in lmms-eval's YAML format; its names go before lmms-eval's
    measures      what is measured besides the task's metrics: `ppl` of the reference answer, `self_rouge` against
                  answers of full sampled at temperature 0.2
    placeholders  what the word <image> in the task's text is: `interleave` (an image stands there), `remove` (nothing:
                  images stay before the text), None (text like any other; `keep` in the configuration)
    media_root    local folder that stands for $HF_HOME where a task expects its videos; None = $HF_HOME itself
    fixture       the data are small ones of our own making, so that scores mean nothing
    columns       columns of the data that the task reads; data without one of them are refused
    cluster_key   document field whose value groups samples for intervals; None: samples with equal media
    """

    name: str
    dataset: str
    size: str | None = None
    split: str | None = None
    count: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    offline: bool = True
    dataset_path: str | None = None
    include_path: str | None = None
    cluster_key: str | None = None
    measures: tuple[str, ...] = ()
    placeholders: str | None = None
    media_root: str | None = None
    fixture: bool = False
    columns: tuple[str, ...] = ()

    @property
    def is_pages(self) -> bool:
        """The data are our own pages, made locally, and not another lmms-eval task's."""
        return self.size is not None

    @property
    def is_mix(self) -> bool:
        """Its samples are of several kinds, so a score has one metric over all and one per kind."""
        return self.is_pages and len(PAGE_TASKS[page_task(self.name)[0]]) > 1

    def sample_id(self, doc_id: int) -> str:
        """The name of the sample at a position of the dataset, from 0; pages have names of their own (`page_data.named`)."""
        return f"{self.dataset}-{doc_id:06d}"

    def key(self) -> str:
        """Canonical text of what decides the samples; equal keys share loaded data."""
        source = (self.name, self.dataset, self.size, self.split, self.dataset_path, self.include_path)
        return json.dumps([*source, self.cluster_key, self.media_root, self.placeholders])
